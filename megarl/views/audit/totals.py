"""The counts of an audit."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StageTotals:
    """Where the groups of a stage went: generated = trained + not chosen + carried + pending.

    A group that several passes train counts once. With a token budget, groups that earlier stages carried into this one
    count as generated here too, but ``tokens`` are only those that the stage's own policy sampled.
    """

    stage: int
    generated: int = 0
    trained: int = 0
    not_chosen: int = 0
    carried: int = 0  # into the next stage
    pending: int = 0  # not trained yet
    tokens: int = 0
    trained_tokens: int = 0
    updates: int = 0
    weights: str = ""  # the beginning of the hash of the policy that generated the stage
