"""How a replica takes its share of the groups of a store, and what it tells of its generation in events.jsonl."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.distributed import ReplicaGroup
from megarl.phases.rollout_worker import RolloutWorker, never
from megarl.phases.stop import StopRequest
from megarl.recipe.schedule import cut_chunks
from megarl.storage.rollouts import Group, Response
from megarl.storage.run_dir import Stage
from megarl.storage.shards import any_unfinished

EVENT_SECONDS = 30.0
SOLVE_RATE_BINS = 5  # share of a group's responses that is right: 0, three equal parts of (0, 1), 1


def missing_chunks(
    groups: Sequence[int], missing: Collection[int], whole: bool, size: int, interval: int | None = None
) -> list[Sequence[int]]:
    """The chunks, lists of group ids, in which engines take the ``missing`` ones of ``groups``.

    whole: for engines with `repeats_chunks`, whose log-probs depend in the last bits on the composition of a batch.
        Chunks are cut every ``size`` groups and at every ``interval``, always at the same places, and a chunk with a
        missing group is repeated as a whole, so that a resumed phase repeats it exactly. Otherwise a chunk is a single
        group, so that an engine takes as many as it has room for.
    interval: groups that one policy version generates; None: all of them.
    """
    if not whole:
        return [[group] for group in groups if group in missing]
    parts = cut_chunks(groups, interval or max(1, len(groups)), size)
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
            self.stats.add(group, earlier(group.group_id))
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
            on_scored=count,
        ):
            store(groups)
            if self.stats.due():
                self.stats.log(self.stage, rank, worker)
        self.stats.log(self.stage, rank, worker)


class RolloutStats:
    """Counts the responses of one replica in one attempt at a phase."""

    def __init__(self) -> None:
        self.start = self._next = time.monotonic()
        self.groups = self.responses = self.tokens = 0
        self.unstopped = 0  # responses that did not end with a stop token
        self.unfinished = 0  # groups that a later stage has to finish
        self.longest = 0
        self.rewards = 0.0
        self.solve_rates = [0] * SOLVE_RATE_BINS

    def add(self, group: Group, earlier: Sequence[Response] = ()) -> None:
        """Count a group; of one that was continued, with its ``earlier`` responses, only the tokens that were added."""
        lengths = [len(response.tokens) for response in group.responses]
        self.tokens += sum(lengths) - sum(len(response.tokens) for response in earlier)
        if any_unfinished(group.responses):
            self.unfinished += 1
            return
        rewards = np.array([response.reward for response in group.responses])
        self.groups += 1
        self.responses += len(lengths)
        self.longest = max(self.longest, *lengths)
        self.unstopped += sum(response.finish_reason != "stop" for response in group.responses)
        self.rewards += float(rewards.sum())
        self.solve_rates[solve_rate_bin(float(np.mean([r.correctness for r in group.responses])))] += 1

    def due(self) -> bool:
        """Whether an event should be logged now; True once every `EVENT_SECONDS`."""
        now = time.monotonic()
        if now - self._next < EVENT_SECONDS:
            return False
        self._next = now
        return True

    def log(self, stage: Stage, rank: int, worker: RolloutWorker) -> None:
        """Append a `rollout_progress` event of replica ``rank`` to events.jsonl."""
        event = self.event(worker.engine.decoding, worker.scoring.over_limit)
        stage.log_event("rollout_progress", rank=rank, **event)

    def event(self, decoding: int, over_limit: int) -> dict[str, Any]:
        """The fields of a `rollout_progress` event.

        decoding: responses that the engine has taken and not finished. over_limit: responses that exceeded the limits
        of their verifier.
        """
        seconds = time.monotonic() - self.start
        return {
            "seconds": round(seconds, 3),
            "groups": self.groups,
            **({"unfinished": self.unfinished} if self.unfinished else {}),
            "responses": self.responses,
            "decoding": decoding,
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens / max(1e-9, seconds), 1),
            "longest": self.longest,
            "truncated": self.unstopped,
            "over_limit": over_limit,
            "reward_sum": self.rewards,
            "solve_rates": self.solve_rates,
        }


def solve_rate_bin(mean: float) -> int:
    """The bin of a group of whose responses the share ``mean`` is right; 0 and 1, without variance, have their own."""
    if mean in (0.0, 1.0):
        return 0 if mean == 0.0 else SOLVE_RATE_BINS - 1
    return 1 + min(int(mean * (SOLVE_RATE_BINS - 2)), SOLVE_RATE_BINS - 3)
