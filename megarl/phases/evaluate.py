"""The evaluate phase: suites answered by the policies that are due, and what the run directory keeps of that."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from megarl.data.prompts import Prompt
from megarl.distributed import ReplicaGroup
from megarl.estimates import summarise
from megarl.phases.generation import generate, missing_chunks
from megarl.phases.rollout_worker import Draws, RolloutWorker
from megarl.phases.scoring import SeededPrompt
from megarl.recipe.tables import Suite
from megarl.rewards.answers import COMPARED, answer_of
from megarl.rollout.engine import never
from megarl.storage import tensorboard_events, trackers
from megarl.storage.evaluations import Answered
from megarl.storage.rollouts import Group, RolloutStore, RolloutWriter, seal
from megarl.storage.run_dir import Stage

SHOWN = 4  # prompts of an evaluation that TensorBoard and trackers show, each with a response
_EVALUATION_SEED = 1 << 40  # apart from the seeds of training responses, which are group ids


def evaluate(stage: Stage) -> None:
    """The phase of evaluations with engines of its own: of a run's end, of a stage that is generated already."""
    replicas = ReplicaGroup.join()
    due = set(stage.due_evaluations())
    # the phase is asked for it, whether the recipe wants it or not
    if stage.run.unevaluated(stage.first_update) and not stage.lost_policy():
        due.add(stage.first_update)
    due = set(replicas.from_first("due", sorted(due)))
    if not due:
        return  # a restart after a process that died between the result and its end
    worker = _evaluate_all(stage, replicas, due, sorted(due), never)
    worker.close()
    replicas.barrier("evaluated")


def start_evaluated(stage: Stage, replicas: ReplicaGroup, interrupted: Callable[[], bool]) -> RolloutWorker:
    """An engine with the stage's policy, after the evaluations that are due have been made, or were interrupted."""
    due = set(replicas.from_first("due", stage.due_evaluations()))
    return _evaluate_all(stage, replicas, due, sorted({*due, stage.first_update}), interrupted, for_training=True)


def _evaluate_all(
    stage: Stage,
    replicas: ReplicaGroup,
    due: Collection[int],
    versions: Sequence[int],
    interrupted: Callable[[], bool],
    for_training: bool = False,
) -> RolloutWorker:
    """One engine that loads ``versions`` one after another and evaluates those that are ``due``."""
    worker: RolloutWorker | None = None
    for version in versions:
        phase = "evaluate" if version in due else "rollout"
        worker = _load(stage, replicas, worker, version, phase, for_training)
        worker.stopped = interrupted
        if version in due:
            evaluate_policy(stage, version, worker, replicas, interrupted)
        if interrupted():
            break
    assert worker is not None
    return worker


def _load(
    stage: Stage, replicas: ReplicaGroup, worker: RolloutWorker | None, version: int, phase: str, for_training: bool
) -> RolloutWorker:
    """An engine that has been found to compute the policy ``version``. ``phase``: what it is to do first."""
    start, run = time.monotonic(), stage.run
    run.check_prompts()
    policy = run.version(version)
    if worker is None:
        path = run.under_one_path(policy, replicas.rank)
        worker = RolloutWorker.build(run.recipe, stage.number, path, for_training)
    else:
        worker.load(policy)
    drift = worker.check_weights(policy, replicas)
    seconds = round(time.monotonic() - start, 3)
    stage.log_event("weight_drift", phase=phase, rank=replicas.rank, load_seconds=seconds, **asdict(drift))
    return worker


def evaluate_policy(
    stage: Stage,
    version: int,
    worker: RolloutWorker,
    replicas: ReplicaGroup,
    interrupted: Callable[[], bool] = never,
) -> None:
    """Append an ``evaluation`` event for each suite that lacks one, and none for what was interrupted.

    What an earlier attempt has stored is not generated again.
    """
    names = replicas.from_first(f"suites/{version}", stage.run.unevaluated(version))
    for suite in (suite for suite in stage.run.recipe.suites if suite.name in names):
        one = _Evaluation(stage, version, suite, worker, replicas)
        start = time.monotonic()
        one.answer(interrupted)
        if interrupted():
            return
        one.finish(start)


class _Evaluation:
    """Of one policy on one suite."""

    def __init__(self, stage: Stage, version: int, suite: Suite, worker: RolloutWorker, replicas: ReplicaGroup) -> None:
        self.stage, self.version, self.suite, self.worker, self.replicas = stage, version, suite, worker, replicas
        self.prompts: list[Prompt] = worker.prompts.heldout(suite.name)
        self.place = Answered.of(stage.run.root, suite.name)
        self.directory = self.place.responses(version)
        self.key = f"{version}/{suite.name}"  # in the replicas' store

    def answer(self, interrupted: Callable[[], bool]) -> None:
        """Store the responses that are missing."""
        found = None
        if self.replicas.rank == 0:
            self.place.write_prompts(self.prompts)
            self.place.begin(self.version, self._settings())
            found = RolloutStore(self.directory).missing(range(len(self.prompts)))
        missing = set(self.replicas.from_first(f"missing/{self.key}", found))
        if not missing:
            return
        if self.replicas.rank == 0 and (there := len(self.prompts) - len(missing)):
            resumed = {"phase": "evaluate", "skipped": there, "total": len(self.prompts), "unit": "prompts"}
            self.stage.log_event("resume", suite=self.suite.name, **resumed)
        suite, worker = self.suite, self.worker
        draws = Draws(suite.samples, suite.temperature, suite.max_response_tokens, suite.top_p)
        whole = draws.temperature > 0 and draws.top_p == 1
        mode = "processed" if whole else "engine"  # of log-probs of what is cut off an engine says what it likes
        with RolloutWriter(
            self.directory, weights_hash=worker.weights_hash, logprob_mode=mode, writer=self.replicas.rank
        ) as writer:
            stops = never if worker.engine.repeats_chunks else interrupted  # a chunk that is begun is finished
            for groups in generate(worker, self._take(missing, interrupted), self._prompt, draws, stops):
                kept = (self._with_answers(group) for group in groups)
                writer.append([group for group in kept if group.group_id in missing])

    def _settings(self) -> dict[str, Any]:
        """All that responses and their rewards depend on beside policy and prompts."""
        names = ("samples", "temperature", "top_p", "max_response_tokens")
        sampling = {name: getattr(self.suite, name) for name in names}
        return sampling | {"reward": self.worker.recipe.reward.model_dump(mode="json")}

    def _take(self, missing: Collection[int], interrupted: Callable[[], bool]) -> Iterator[Sequence[int]]:
        whole, size = self.worker.engine.repeats_chunks, self.worker.recipe.rollout.groups_per_chunk
        chunks, counter = missing_chunks(range(len(self.prompts)), missing, whole, size), self.replicas.store
        while not interrupted() and (number := counter.add(f"next/{self.key}", 1) - 1) < len(chunks):
            yield chunks[number]

    def _prompt(self, number: int) -> SeededPrompt:
        return SeededPrompt(_EVALUATION_SEED + number, self.prompts[number])

    def _with_answers(self, group: Group) -> Group:
        """Under the prompt's number, with what the responses say, and without routed experts, which nobody replays."""
        kind, decode = self.worker.recipe.reward.kind, self.worker.tokenizer.decode
        responses = tuple(replace(response, routed_experts=None) for response in group.responses)
        if kind in COMPARED and self.suite.samples > 1:
            texts = (decode(response.tokens, skip_special_tokens=True) for response in responses)
            answers = (answer_of(kind, text) for text in texts)
            responses = tuple(replace(r, answer=a) for r, a in zip(responses, answers, strict=True))
        return Group(group.group_id - _EVALUATION_SEED, group.prompt_tokens, responses)

    def finish(self, start: float) -> None:
        """Seal the responses and log what they amount to; ``start``: when the first of them was asked for."""
        stage, suite = self.stage, self.suite
        generated = round(time.monotonic() - start, 3)
        over = self.replicas.gather(f"answered/{self.key}", self.worker.scoring.over_limit)
        self.worker.scoring.over_limit = 0  # of what follows
        if self.replicas.rank:
            return
        seal(self.directory, range(len(self.prompts)))
        result = _summary(self.place.read(self.version), self.worker.recipe.reward.kind in COMPARED)
        stage.log_event(
            "evaluation",
            update=self.version,
            suite=suite.name,
            policy=str(stage.run.version(self.version).relative_to(stage.run.root)),
            **result,
            over_limit=sum(over),
            temperature=suite.temperature,
            top_p=suite.top_p,
            generate_seconds=generated,
            seconds=round(time.monotonic() - start, 3),
        )
        table, of = stage.run.recipe.run, (suite.name, self.version, result)
        if table.tensorboard:
            tensorboard_events.log_evaluation(stage.run.root, *of, self._samples())
        trackers.log_evaluation(stage.run.root, table, *of, self._samples())

    def _samples(self) -> Iterator[tuple[str, str]]:
        """Of the first prompts, each with its first response."""
        decode = self.worker.tokenizer.decode
        for group in itertools.islice(self.place.read(self.version), SHOWN):
            yield decode(group.prompt_tokens), decode(group.responses[0].tokens)


def _summary(groups: Sequence[Group], compares: bool) -> dict[str, object]:
    """`summarise` of stored responses, so that a continued evaluation ends with the numbers of one in a single go."""
    correct = np.array([[response.correctness for response in group.responses] for group in groups])
    answers = [[response.answer for response in group.responses] for group in groups]
    return summarise(correct, answers if compares else None)
