"""What an audit counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StageTotals:
    """The closing ledger of a stage: generated = trained + not chosen + pending, in groups and in response tokens.

    What several passes train counts once.
    """

    stage: int
    generated: int = 0
    trained: int = 0
    not_chosen: int = 0
    pending: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    updates: int = 0
    weights: str = ""  # the beginning of the hash of the policy that generated them
