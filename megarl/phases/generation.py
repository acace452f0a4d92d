"""How a replica takes its share of the groups of a store, and what it tells of its generation in events.jsonl."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from megarl.distributed import ReplicaGroup
from megarl.phases.rollout_worker import RolloutWorker
from megarl.recipe.schedule import cut_chunks
from megarl.rollout.engine import Completion
from megarl.storage.rollouts import Group
from megarl.storage.run_dir import Stage
from megarl.storage.shards import any_unfinished

EVENT_SECONDS = 30.0  # between two events about the progress; less in the first minute


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


def shared_chunks(
    replicas: ReplicaGroup, name: str, chunks: Sequence[Sequence[int]], ended: Callable[[], bool]
) -> Callable[[], Sequence[int] | None]:
    """A function that takes the next chunk; it returns None if there is none, or once ``ended`` returns True.

    The replicas share the counter ``name``, so that a slow one does not hold up the others.
    """

    def take() -> Sequence[int] | None:
        number = len(chunks) if ended() else replicas.store.add(f"next_chunk/{name}", 1) - 1
        return chunks[number] if number < len(chunks) else None

    return take


class RolloutStats:
    """Counts the responses of replica ``rank`` in one attempt at a phase; `step` watches its ``worker``.

    on_group: called with each group as soon as it is scored.
    evaluated: the number of prompts of an evaluation, from which no update learns; 0 if the groups are trained.
    """

    def __init__(
        self,
        stage: Stage,
        rank: int,
        worker: RolloutWorker,
        on_group: Callable[[Group], None] = lambda group: None,
        evaluated: int = 0,
    ) -> None:
        self.stage, self.rank, self.worker, self.on_group = stage, rank, worker, on_group
        self.start = self._logged = time.monotonic()
        self.ended = self.tokens = 0  # responses that have ended, in complete groups or not, and their new tokens
        self.groups = self.responses = 0  # complete groups and their responses
        self.unstopped = 0  # responses that did not end with a stop token
        self.unfinished = 0  # groups that a later stage has to finish
        self.longest = 0
        self.rewards = 0.0
        self.evaluated = evaluated

    def step(self, ended: Sequence[Completion], scored: Sequence[Group]) -> None:
        """Count responses that ``ended``, or were interrupted, and ``scored`` groups; log an event if one is due."""
        self.ended += sum(completion.finish_reason != "interrupted" for completion in ended)
        self.tokens += sum(len(completion.tokens) for completion in ended)
        now = time.monotonic()
        # soon at first, since a chunk may take minutes
        if now - self._logged >= min(EVENT_SECONDS, max(1.0, self._logged - self.start)):
            self._logged = now
            self.log()
        for group in scored:
            self.on_group(group)
            self._add(group)

    def _add(self, group: Group) -> None:
        lengths = [len(response.tokens) for response in group.responses]
        if any_unfinished(group.responses):
            self.unfinished += 1
            return
        self.groups += 1
        self.responses += len(lengths)
        self.longest = max(self.longest, *lengths)
        self.unstopped += sum(response.finish_reason != "stop" for response in group.responses)
        self.rewards += sum(response.reward for response in group.responses)

    def log(self) -> None:
        """Append an event about the progress to events.jsonl."""
        kind = "evaluation_progress" if self.evaluated else "rollout_progress"
        self.stage.log_event(kind, rank=self.rank, **self.event())

    def event(self) -> dict[str, Any]:
        """The fields of a `rollout_progress` or `evaluation_progress` event.

        decoding: responses that the engine has taken and not finished. decoding_tokens: their tokens so far.
        over_limit: responses that exceeded the limits of their verifier. discarded: those that the engine returned
        wrongly, and that are generated again.
        """
        seconds, engine = time.monotonic() - self.start, self.worker.engine
        return {
            "seconds": round(seconds, 3),
            "groups": self.groups,
            **({"prompts": self.evaluated} if self.evaluated else {}),
            **({"unfinished": self.unfinished} if self.unfinished else {}),
            "responses": self.responses,
            "ended": self.ended,
            "decoding": engine.decoding,
            "tokens": self.tokens,
            "decoding_tokens": engine.decoding_tokens,
            "tokens_per_second": round((self.tokens + engine.decoding_tokens) / max(1e-9, seconds), 1),
            "longest": self.longest,
            "truncated": self.unstopped,
            "over_limit": self.worker.scoring.over_limit,
            **({"discarded": self.worker.discarded} if self.worker.discarded else {}),
            "reward_sum": self.rewards,
        }
