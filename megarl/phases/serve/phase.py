"""The serve phase: one engine answers what agents ask, until every group of the stage is stored; then it is sealed."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from megarl.beats import WAITS, beat
from megarl.data.templates import Renderer
from megarl.distributed import ReplicaGroup
from megarl.errors import STOPPED, UserError
from megarl.phases.evaluate import start_evaluated
from megarl.phases.rollout_worker import RolloutWorker
from megarl.phases.serve import KEY
from megarl.phases.serve.book import Book, Turn
from megarl.phases.serve.server import serving
from megarl.phases.stop import StopRequest
from megarl.rollout.engine import Completion, Request, Sampling
from megarl.storage.files import fsync_path, make_directory
from megarl.storage.json_lines import append_json, read_intact_lines
from megarl.storage.requests import read_request
from megarl.storage.rollouts import SERVED, Group, RolloutStore, RolloutWriter, seal
from megarl.storage.run_dir import Stage

MIN_KEY = 32  # characters: an empty key would let everybody in
IDLE_SECONDS = 0.05  # between two looks at whether the phase is to stop


@dataclass(eq=False)
class _Job:
    turn: Turn
    done: threading.Event = field(default_factory=threading.Event)
    completion: Completion | None = None


class Line:
    """What agents ask, in the order in which they do, for an engine that takes what it has room for.

    over: whether nothing more is to be generated.
    """

    def __init__(self, worker: RolloutWorker, over: Callable[[], bool]) -> None:
        self._worker, self._over = worker, over
        self._waiting: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._taken: dict[int, _Job] = {}
        self._count = 0

    def ask(self, turn: Turn) -> Completion | None:
        """Wait for the answer; None: the engine was interrupted. Called by the threads of the server."""
        job = _Job(turn)
        self._waiting.put(job)
        while not job.done.wait(IDLE_SECONDS):
            if self._over() and not self._taken:
                return None  # it came when the engine had ended
        return job.completion

    def requests(self) -> Iterator[Request | None]:
        """For `RolloutEngine.serve`; None while nobody asks, though responses are being decoded."""
        while not self._over():
            try:
                job = self._waiting.get_nowait() if self._taken else self._waiting.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                if self._taken:
                    yield None
                else:
                    beat(WAITS, "a wait for agents")
                continue
            beat("turn", f"turn {self._count + 1}")
            self._taken[self._count] = job
            self._count += 1
            yield self._request(job.turn)

    def answer(self, number: int, completion: Completion) -> None:
        """Hand out what the engine made of a request."""
        job = self._taken.pop(number)
        job.completion = None if completion.finish_reason == "interrupted" else completion
        job.done.set()

    def _request(self, turn: Turn) -> Request:
        table = self._worker.recipe.rollout
        sampling = Sampling(
            temperature=table.temperature,
            max_tokens=turn.limit,
            samples=1,
            stop_token_ids=self._worker.stop_token_ids,
            seeds=(turn.seed,),
            timeout=table.response_timeout,
        )
        return Request([turn.prompt], sampling)


def serve(stage: Stage) -> None:
    """Fill and seal ``stage`` with what agents do. Groups that an earlier attempt stored stay."""
    stop = StopRequest()
    if stage.is_sealed():
        return
    replicas = ReplicaGroup.join(while_waiting=stop.exit_if_asked)
    make_directory(stage.rollouts)
    worker = start_evaluated(stage, replicas, lambda: stop.asked)
    if stop.asked:
        worker.close()
        sys.exit(STOPPED)
    names = stage.rollouts / SERVED
    with RolloutWriter(
        stage.rollouts, weights_hash=worker.weights_hash, logprob_mode="processed", external=True
    ) as writer:

        def store(name: str, group: Group) -> None:
            append_json(names, {"group": name, "number": group.group_id})
            fsync_path(names)  # a group without its name could not be told from another
            writer.append([group])

        book = Book(
            stage.run.recipe,
            stage.groups,
            Renderer(stage.run.recipe.data, worker.tokenizer),
            lambda tokens: str(worker.tokenizer.decode(tokens, skip_special_tokens=True)),
            stage.first_update,
            store,
            _stored(stage, names),
        )
        _answer(stage, worker, book, stop)
    worker.close()
    if not book.complete:
        sys.exit(STOPPED)
    seal(stage.rollouts, stage.groups, external=True)


def _stored(stage: Stage, names: Path) -> dict[str, int]:
    """Names of the groups that are in the store; a kill may have come between a name and its group."""
    there = set(RolloutStore(stage.rollouts).group_ids)
    lines = read_intact_lines(names)[0] if names.exists() else []
    found = {line["number"]: line["group"] for line in lines if line["number"] in there}
    if found.keys() != there:
        raise UserError(f"{stage.rollouts} has groups that {SERVED} does not name: delete that folder, and start again")
    return {name: number for number, name in found.items()}


def _answer(stage: Stage, worker: RolloutWorker, book: Book, stop: StopRequest) -> None:
    """Until the stage is complete, or the phase is told to stop."""
    root, line = stage.run.root, Line(worker, lambda: stop.asked or book.complete)
    key = (root / KEY).read_text().strip()
    if len(key) < MIN_KEY:
        raise UserError(f"{root / KEY} holds no key: remove it, and start again")
    with serving(read_request(root)["port"], book, line.ask, key, root.name) as port:
        stage.log_event("serving", phase="serve", url=f"http://127.0.0.1:{port}")
        for number, completion in worker.engine.serve(line.requests(), lambda: stop.asked):
            line.answer(number, completion)
