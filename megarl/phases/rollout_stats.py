"""Statistics of a replica's generation for events.jsonl: speed, queue, lengths, truncation, rewards."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from megarl.phases.scoring import ScoredGroup
from megarl.storage.shards import any_unfinished

EVENT_SECONDS = 30.0
SOLVE_RATE_BINS = 5  # share of a group's responses that is right: 0, three equal parts of (0, 1), 1


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

    def add(self, group: ScoredGroup) -> None:
        """Count a group; of an unfinished one only the tokens that were added."""
        lengths = [len(response.tokens) for response in group.responses]
        self.tokens += sum(lengths) - sum(len(response.tokens) for response in group.seeded.earlier)
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
