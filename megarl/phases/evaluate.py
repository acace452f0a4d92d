"""The evaluate phase: engines answer the evaluation suites with each policy that is due, and store the results.

The rollout phase uses the same code where an evaluation is due before it. A policy is given by its ``version``, the
number of updates of the run that made it.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.data.prompts import Prompt
from megarl.distributed import ReplicaGroup
from megarl.errors import STOPPED
from megarl.estimates import summarise
from megarl.phases.generation import RolloutStats, missing_chunks, shared_chunks
from megarl.phases.rollout_worker import RolloutWorker, never, with_policy
from megarl.phases.scoring import text_of
from megarl.phases.stop import StopRequest
from megarl.recipe.tables import Suite
from megarl.rewards import is_scored
from megarl.rewards.answers import COMPARED, answer_of
from megarl.storage.metrics import trackers
from megarl.storage.metrics.summary import by_columns
from megarl.storage.rollouts import Group, RolloutStore, RolloutWriter, seal
from megarl.storage.run_dir import Stage
from megarl.storage.run_dir.evaluations import SuiteResponses

SHOWN = 4  # prompts of an evaluation that are shown in TensorBoard and trackers, each with one response
_EVALUATION_SEED = 1 << 40  # added to prompt numbers, so that seeds differ from those of training groups


def evaluate(stage: Stage) -> None:
    """Run a phase of evaluations only: at a run's end, or for a stage whose rollouts exist already."""
    replicas = ReplicaGroup.join()
    due = set(stage.due_evaluations())
    # who starts this phase wants the stage's own policy evaluated, even if the recipe's schedule does not
    if stage.run.unevaluated(stage.first_update) and not stage.policy_was_removed():
        due.add(stage.first_update)
    due = set(replicas.from_first("due", sorted(due)))
    if not due:
        return  # restarted after a process died between its last result and its exit
    _evaluate_all(stage, replicas, due, for_training=False).close()
    replicas.barrier("evaluated")


def evaluate_due(stage: Stage, replicas: ReplicaGroup, stop: StopRequest) -> RolloutWorker:
    """Evaluate the policies that are due; returns the engine with the stage's policy, or exits if asked to stop."""
    due = set(replicas.from_first("due", stage.due_evaluations()))
    worker = _evaluate_all(stage, replicas, due, True, lambda: stop.asked)
    if stop.asked:  # the worker may hold unfinished responses of an evaluation
        worker.close()
        sys.exit(STOPPED)
    return worker


def _evaluate_all(
    stage: Stage,
    replicas: ReplicaGroup,
    due: Collection[int],
    for_training: bool,
    stopped: Callable[[], bool] = never,
) -> RolloutWorker:
    """Load the policies that are ``due`` one after another into one engine and evaluate them; returns the engine.

    for_training: load the stage's policy at the end, which is to generate its rollouts.
    """
    worker: RolloutWorker | None = None
    for version in sorted({*due, stage.first_update} if for_training else due):
        place = {"phase": "evaluate" if version in due else "rollout"}
        worker = with_policy(worker, stage, stage.run.version(version), replicas, place, for_training)
        worker.stopped = stopped
        # suites that have no ``evaluation`` event for this policy yet
        names = replicas.from_first(f"suites/{version}", stage.run.unevaluated(version)) if version in due else ()
        for suite in (suite for suite in stage.run.recipe.suites if suite.name in names):
            one = _Evaluation(stage, version, suite, worker, replicas)
            one.answer()
            if stopped():
                break
            one.finish()
        if stopped():
            break
    assert worker is not None
    return worker


class _Evaluation:
    """The evaluation of one policy on one suite. Responses that an earlier attempt stored are not generated again."""

    def __init__(self, stage: Stage, version: int, suite: Suite, worker: RolloutWorker, replicas: ReplicaGroup) -> None:
        self.stage, self.version, self.suite, self.worker, self.replicas = stage, version, suite, worker, replicas
        self.start = time.monotonic()
        self.prompts: list[Prompt] = worker.prompts.heldout(suite.name)
        self.place = SuiteResponses.of(stage.run.root, suite.name)
        self.directory = self.place.responses(version)
        self.key = f"{version}/{suite.name}"  # part of its keys in the replicas' store

    def answer(self) -> None:
        """Generate and store the responses that are missing; all replicas share the work."""
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
        draws = worker.sampling(
            samples=suite.samples,
            temperature=suite.temperature,
            max_tokens=suite.max_response_tokens,
            top_p=suite.top_p,
        )
        chunks = missing_chunks(
            range(len(self.prompts)), missing, worker.engine.repeats_chunks, worker.recipe.rollout.groups_per_chunk
        )
        whole = draws.temperature > 0 and draws.top_p == 1
        mode = "processed" if whole else "engine"  # with top_p < 1 or temperature 0 log-probs depend on the engine
        with RolloutWriter(
            self.directory, weights_hash=worker.weights_hash, logprob_mode=mode, writer=self.replicas.rank
        ) as writer:
            take = shared_chunks(self.replicas, self.key, chunks, worker.stopped)
            stats = RolloutStats(self.stage, self.replicas.rank, worker, evaluated=len(self.prompts))
            prompt, seeds = self.prompts.__getitem__, _EVALUATION_SEED
            for groups in worker.generate(take, prompt, draws, other_seeds=seeds, watch=stats.step):
                writer.append([self._as_stored(group) for group in groups if group.group_id in missing])
        stats.log()

    def _settings(self) -> dict[str, Any]:
        """The settings, beside policy and prompts, on which the responses and their rewards depend."""
        names = ("samples", "temperature", "top_p", "max_response_tokens")
        sampling = {name: getattr(self.suite, name) for name in names}
        return sampling | {"reward": self.worker.recipe.reward.model_dump(mode="json")}

    def _as_stored(self, group: Group) -> Group:
        """The group with extracted answers and without routed experts."""
        kind, decode = self.worker.recipe.reward.kind, text_of(self.worker.tokenizer)
        responses = tuple(replace(response, routed_experts=None) for response in group.responses)
        if kind in COMPARED and self.suite.samples > 1:
            answers = [answer_of(kind, decode(response.tokens)) for response in responses]
            table = self.worker.recipe.reward  # a response that is wrong unread does not vote
            responses = tuple(
                replace(r, answer=a if is_scored(r.finish_reason, table) else None)
                for r, a in zip(responses, answers, strict=True)
            )
        return replace(group, responses=responses)

    def finish(self) -> None:
        """Seal the responses and log the results."""
        stage, suite, start = self.stage, self.suite, self.start
        generated = round(time.monotonic() - start, 3)
        over = self.replicas.gather(f"answered/{self.key}", self.worker.scoring.over_limit)
        self.worker.scoring.over_limit = self.worker.discarded = 0  # the next suite, or the rollouts, count from 0
        if self.replicas.rank:
            return
        seal(self.directory, range(len(self.prompts)))
        groups = self.place.read(self.version)
        result = _summary(groups, self.worker.recipe.reward.kind in COMPARED)
        result |= by_columns(groups, self.worker.recipe.metrics.by, tokens=None)
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
        table, logged = stage.run.recipe.run, (suite.name, self.version, result)
        trackers.log_evaluation(stage.run.root, table, *logged, self._samples())

    def _samples(self) -> Iterator[tuple[str, str]]:
        """(prompt, first response) as text, for the first prompts."""
        decode = self.worker.tokenizer.decode
        for group in itertools.islice(self.place.read(self.version), SHOWN):
            yield str(decode(group.prompt_tokens)), str(decode(group.responses[0].tokens))


def _summary(groups: Sequence[Group], compares: bool) -> dict[str, object]:
    """`summarise` on the stored responses, so that a resumed evaluation gives the same numbers as an unbroken one.

    ``discarded``, if there are any: faulty attempts of the engine that were thrown away.

    compares: whether the stored answers can be compared, as maj@k needs.
    """
    correct = np.array([[response.correctness for response in group.responses] for group in groups])
    answers = [[response.answer for response in group.responses] for group in groups]
    discarded = sum(response.discarded or 0 for group in groups for response in group.responses)
    cut = np.mean([response.finish_reason != "stop" for group in groups for response in group.responses])
    found = summarise(correct, answers if compares else None) | {"truncated": round(float(cut), 6)}
    return found | ({"discarded": discarded} if discarded else {})
