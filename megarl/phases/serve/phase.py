"""The serve phase: one engine answers agents' requests until every group of the stage is stored; then it seals them."""

from __future__ import annotations

import contextlib
import queue
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from megarl.data.templates import Renderer
from megarl.distributed import ReplicaGroup
from megarl.errors import STOPPED, UserError
from megarl.heartbeats import beat
from megarl.phases.evaluate import evaluate_due
from megarl.phases.rollout_worker import RolloutWorker
from megarl.phases.serve import KEY
from megarl.phases.serve.chat import decoder
from megarl.phases.serve.conversations import Conversations, Turn
from megarl.phases.serve.server import serving
from megarl.phases.stop import StopRequest
from megarl.rollout.engine import Completion, Request, discard, fault, next_seed
from megarl.storage.checked_json import append_json, read_intact_lines
from megarl.storage.files import fsync_path, make_directory
from megarl.storage.rollouts import SERVED, Group, RolloutStore, RolloutWriter, seal
from megarl.storage.run_dir import Stage

MIN_KEY = 32  # least number of characters: with an empty key everybody would be admitted
IDLE_SECONDS = 0.05  # between two checks of whether the phase must stop


_Asked = tuple[Turn, Future[Completion | None]]


class TurnQueue:
    """Queue of the turns that agents ask for, first in, first out; the engine takes one when it has room for it.

    over: returns True once no more turns must be generated.
    """

    def __init__(self, worker: RolloutWorker, over: Callable[[], bool]) -> None:
        self._worker, self._over = worker, over
        self._waiting: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        self._taken: dict[int, _Asked] = {}

    def ask(self, turn: Turn) -> Completion | None:
        """Queue a turn and wait for its answer; None if the engine was interrupted. Called by the server's threads."""
        found: Future[Completion | None] = Future()
        self._waiting.put((turn, found))
        while True:
            with contextlib.suppress(TimeoutError):
                return found.result(IDLE_SECONDS)
            if self._over() and not self._taken:
                return None  # it was queued after the engine had ended

    def run(self, stop: Callable[[], bool]) -> None:
        """Generate turns until ``over``; once ``stop`` returns True, those being generated are dropped, too.

        An answer that the engine returned wrongly is generated again; `EngineFault` if that happens too often.
        """
        engine, taken = self._worker.engine, 0
        while not self._over() or (engine.decoding and not stop()):
            if not self._over() and engine.has_room() and (job := self._next(wait=not engine.decoding)):
                beat("turn", f"turn {taken + 1}")
                self._taken[taken], (turn, _) = job, job
                seed = next_seed(turn.seed, turn.discarded)
                draws = self._worker.sampling(samples=1, max_tokens=turn.limit, seeds=(seed,))
                engine.submit(taken, Request([turn.prompt], draws))
                taken += 1
            elif engine.decoding:
                self._answer(engine.step())
        self._answer(engine.interrupt())

    def _next(self, wait: bool) -> _Asked | None:
        """The next job; None if there is none. wait: for a moment."""
        try:
            return self._waiting.get(timeout=IDLE_SECONDS) if wait else self._waiting.get_nowait()
        except queue.Empty:
            if wait:
                beat("idle", "wait for requests of agents")  # not for other processes
            return None

    def _answer(self, completions: list[tuple[int, Completion]]) -> None:
        """Pass completions to the threads that wait for them."""
        for number, completion in completions:
            turn, found = self._taken.pop(number)
            if completion.finish_reason == "interrupted":
                found.set_result(None)
            elif why := fault(completion, turn.limit, self._worker.vocabulary):
                turn.discarded = discard(why, "the answer to an agent", turn.discarded)
                self._waiting.put((turn, found))
            else:
                found.set_result(completion)


def serve(stage: Stage) -> None:
    """Fill ``stage`` with the conversations of agents and seal it. Groups that an earlier attempt stored are kept."""
    stop = StopRequest()
    if stage.is_sealed():
        return
    replicas = ReplicaGroup.join(while_waiting=stop.exit_if_asked)
    make_directory(stage.rollouts)
    worker = evaluate_due(stage, replicas, stop)
    names = stage.rollouts / SERVED
    with RolloutWriter(
        stage.rollouts, weights_hash=worker.weights_hash, logprob_mode="processed", external=True
    ) as writer:

        def store(name: str, group: Group) -> None:
            append_json(names, {"group": name, "number": group.group_id})
            fsync_path(names)  # before the group, which after a restart could not be identified without its name
            writer.append([group])

        conversations = Conversations(
            stage.run.recipe,
            stage.groups,
            Renderer(stage.run.recipe.data, worker.tokenizer),
            decoder(worker.tokenizer),
            stage.first_update,
            store,
            _stored(stage, names),
            worker.prompts.banned,
        )
        _answer(stage, worker, conversations, stop)
    worker.close()
    if not conversations.complete:
        sys.exit(STOPPED)
    seal(stage.rollouts, stage.groups, external=True)


def _stored(stage: Stage, names: Path) -> dict[str, int]:
    """{name: id} of the stored groups. A name without a group is left out: a kill came before the group was stored."""
    there = set(RolloutStore(stage.rollouts).group_ids)
    lines = read_intact_lines(names)[0] if names.exists() else []
    found = {line["number"]: line["group"] for line in lines if line["number"] in there}
    if found.keys() != there:
        raise UserError(
            f"{stage.rollouts} has groups whose names {SERVED} lacks: delete {stage.rollouts}, with all groups of "
            "the stage, then start again"
        )
    return {name: number for number, name in found.items()}


def _answer(stage: Stage, worker: RolloutWorker, conversations: Conversations, stop: StopRequest) -> None:
    """Serve requests until the stage is complete or the phase is told to stop."""
    root, turns = stage.run.root, TurnQueue(worker, lambda: stop.asked or conversations.complete)
    key = (root / KEY).read_text().strip()
    if len(key) < MIN_KEY:
        raise UserError(f"{root / KEY} holds no key of at least {MIN_KEY} characters: delete it, and start again")
    with serving(stage.run.receive("request")["port"], conversations, turns.ask, key, root.name) as port:
        stage.log_event("serving", phase="serve", url=f"http://127.0.0.1:{port}")
        turns.run(lambda: stop.asked)
