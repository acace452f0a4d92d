"""What an audit counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StageTotals:
    """The closing ledger of a stage: generated = trained + not chosen + carried + pending, in groups.

    What several passes train counts once. With a token budget, what earlier stages carried into this one is generated
    here too, but ``tokens`` are those that its own policy sampled.
    """

    stage: int
    generated: int = 0
    trained: int = 0
    not_chosen: int = 0
    carried: int = 0  # into the next stage
    pending: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    updates: int = 0
    weights: str = ""  # the beginning of the hash of the policy that generated them
