"""How a replica takes its share of the groups of a store, and what it tells of its generation in events.jsonl."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.distributed import ReplicaGroup
from megarl.phases.rollout_worker import RolloutWorker, never
from megarl.phases.stop import StopRequest
from megarl.recipe.names import GROUP_ADVANTAGES
from megarl.recipe.schedule import cut_chunks
from megarl.rollout.engine import Completion
from megarl.storage.rollouts import Group, Response
from megarl.storage.run_dir import Stage
from megarl.storage.shards import any_unfinished

EVENT_SECONDS = 30.0  # between two events about the progress; less in the first minute
SAME_REWARDS = 32  # a warning if in each of so many groups, the first of a phase, all rewards are equal
SOLVE_RATE_BINS = 5  # share of a group's responses that is right: 0, three equal parts of (0, 1), 1


def missing_chunks(
    groups: Sequence[int], missing: Collection[int], whole: bool, size: int, interval: int | None = None, first: int = 0
) -> list[Sequence[int]]:
    """The chunks, lists of group ids, in which engines take the ``missing`` ones of ``groups``.

    whole: for engines with `repeats_chunks`, whose log-probs depend in the last bits on the composition of a batch.
        Chunks are cut every ``size`` groups and at every ``interval``, always at the same places, and a chunk with a
        missing group is repeated as a whole, so that a resumed phase repeats it exactly. Otherwise a chunk is a single
        group, so that an engine takes as many as it has room for.
    interval, first: as in `cut_chunks`; by default one policy version generates all groups.
    """
    if not whole:
        return [[group] for group in groups if group in missing]
    parts = cut_chunks(groups, interval or max(1, len(groups)), size, first)
    return [part for part in parts if any(group in missing for group in part)]


@dataclass
class ReplicaRollouts:
    """One replica's part in the rollouts of a stage."""

    stage: Stage
    replicas: ReplicaGroup
    worker: RolloutWorker
    stop: StopRequest
    stats: RolloutStats = field(default_factory=lambda: RolloutStats())

    def fill(
        self,
        name: str,
        chunks: Sequence[Sequence[int]],
        store: Callable[[list[Group]], None],
        *,
        may_begin: Callable[[Sequence[int]], bool] = lambda chunk: True,
        enough: Callable[[], bool] = never,
        earlier: Callable[[int], tuple[Response, ...]] = lambda group: (),
        budget: float = math.inf,
        scored_first: bool = False,
        on_scored: Callable[[Group], None] = lambda group: None,
    ) -> None:
        """Generate ``chunks``, together with all replicas, until there are ``enough`` or a stop is asked for.

        name: of this work in the replicas' store. store: writes a portion of groups. budget: largest number of tokens
        to add to each response. Other arguments as in `RolloutWorker.generate`.
        """

        def take() -> Sequence[int] | None:
            # from a counter that the replicas share, so that a slow one does not hold up the others
            if self.stop.asked or (number := self.replicas.store.add(f"next_chunk/{name}", 1) - 1) >= len(chunks):
                return None
            return chunks[number] if may_begin(chunks[number]) else None

        def count(group: Group) -> None:
            self.stats.add(group)
            on_scored(group)

        worker, rank = self.worker, self.replicas.rank
        for groups in worker.generate(
            take,
            worker.prompts.train,
            worker.sampling(budget=budget),
            # an engine with `repeats_chunks` finishes the chunk it has begun
            interrupted=never if worker.engine.repeats_chunks else lambda: self.stop.asked or enough(),
            earlier=earlier,
            scored_first=scored_first,
            on_step=functools.partial(self.stats.step, self.stage, rank, worker),
            on_scored=count,
        ):
            store(groups)
        self.stats.log(self.stage, rank, worker)


class RolloutStats:
    """Counts the responses of one replica in one attempt at a phase."""

    def __init__(self) -> None:
        self.start = self._logged = time.monotonic()
        self.ended = self.tokens = 0  # responses that have ended, in complete groups or not, and their new tokens
        self.groups = self.responses = 0  # complete groups and their responses
        self.varied = 0  # groups in which rewards differ
        self.unstopped = 0  # responses that did not end with a stop token
        self.unfinished = 0  # groups that a later stage has to finish
        self.longest = 0
        self.rewards = 0.0
        self.solve_rates = [0] * SOLVE_RATE_BINS
        self._warned = False

    def step(self, stage: Stage, rank: int, worker: RolloutWorker, ended: Sequence[Completion]) -> None:
        """Count the responses that ``ended`` in a step of the engine, and log an event if one is due."""
        self.count(ended)
        now = time.monotonic()
        # soon at first, since a chunk may take minutes
        if now - self._logged >= min(EVENT_SECONDS, max(1.0, self._logged - self.start)):
            self._logged = now
            self.log(stage, rank, worker)

    def count(self, ended: Sequence[Completion]) -> None:
        """Count responses that ended, or were interrupted."""
        self.ended += sum(completion.finish_reason != "interrupted" for completion in ended)
        self.tokens += sum(len(completion.tokens) for completion in ended)

    def add(self, group: Group) -> None:
        """Count a group."""
        lengths = [len(response.tokens) for response in group.responses]
        if any_unfinished(group.responses):
            self.unfinished += 1
            return
        rewards = np.array([response.reward for response in group.responses])
        self.groups += 1
        self.responses += len(lengths)
        self.longest = max(self.longest, *lengths)
        self.unstopped += sum(response.finish_reason != "stop" for response in group.responses)
        self.rewards += float(rewards.sum())
        self.varied += bool((rewards != rewards[0]).any())
        self.solve_rates[solve_rate_bin(float(np.mean([r.correctness for r in group.responses])))] += 1

    def log(self, stage: Stage, rank: int, worker: RolloutWorker) -> None:
        """Append a `rollout_progress` event of replica ``rank`` to events.jsonl, and once a warning, if it is due."""
        engine = worker.engine
        event = self.event(engine.decoding, engine.decoding_tokens, worker.scoring.over_limit, worker.discarded)
        stage.log_event("rollout_progress", rank=rank, **event)
        if not self._warned and self.equal_rewards(stage.run.recipe.objective.advantage):
            self._warned = True
            stage.log_event("equal_rewards", rank=rank, groups=self.groups, warning=self._warning())

    def equal_rewards(self, advantage: str) -> bool:
        """Whether the first groups all have equal rewards, so that the ``advantage`` of each response is 0."""
        return advantage in GROUP_ADVANTAGES and self.groups >= SAME_REWARDS and not self.varied

    def _warning(self) -> str:
        mean = self.rewards / max(1, self.responses)
        return (
            f"in each of the first {self.groups} groups all responses have the same reward ({mean:.3f} on average), so "
            "no update learns from them: `megarl samples` shows what the model answers, and the reward of each response"
        )

    def event(self, decoding: int, decoding_tokens: int, over_limit: int, discarded: int = 0) -> dict[str, Any]:
        """The fields of a `rollout_progress` event.

        decoding: responses that the engine has taken and not finished. decoding_tokens: their tokens so far.
        over_limit: responses that exceeded the limits of their verifier. discarded: those that the engine returned
        wrongly, and that are generated again.
        """
        seconds = time.monotonic() - self.start
        return {
            "seconds": round(seconds, 3),
            "groups": self.groups,
            **({"unfinished": self.unfinished} if self.unfinished else {}),
            "responses": self.responses,
            "ended": self.ended,
            "decoding": decoding,
            "tokens": self.tokens,
            "decoding_tokens": decoding_tokens,
            "tokens_per_second": round((self.tokens + decoding_tokens) / max(1e-9, seconds), 1),
            "longest": self.longest,
            "truncated": self.unstopped,
            "over_limit": over_limit,
            **({"discarded": discarded} if discarded else {}),
            "reward_sum": self.rewards,
            "solve_rates": self.solve_rates,
        }


def solve_rate_bin(mean: float) -> int:
    """The bin of a group of whose responses the share ``mean`` is right; 0 and 1, without variance, have their own."""
    if mean in (0.0, 1.0):
        return 0 if mean == 0.0 else SOLVE_RATE_BINS - 1
    return 1 + min(int(mean * (SOLVE_RATE_BINS - 2)), SOLVE_RATE_BINS - 3)
