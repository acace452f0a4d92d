"""Negative-advantage veto of mu-GRPO: which tokens of a response with a trigger lose their gradient."""

from __future__ import annotations

import torch

from megarl.batch import TokenBatch
from megarl.kernels.constants import NEVER
from megarl.objectives.parts.sequences import sequence_min

SCOPES = ("sequence", "suffix", "non_trigger_suffix", "trigger")


def veto_mask(ratio: torch.Tensor, batch: TokenBatch, threshold: float, scope: str) -> torch.Tensor:
    """[T] bool without gradient, True = vetoed.

    A trigger is a trained token with A < 0 and ratio < threshold; tau is the first trigger's position in its response.
    sequence: all trained tokens with A < 0 of a response with a trigger. suffix: those after tau, tau excluded.
    non_trigger_suffix: the suffix without triggers. trigger: the triggers alone.
    """
    negative = batch.loss_mask & (batch.advantages < 0)
    trigger = negative & (ratio.detach() < threshold)
    if scope == "trigger":
        return trigger
    position = batch.positions
    first = sequence_min(torch.where(trigger, position, NEVER), NEVER, batch.cu_seqlens, batch.shard)  # [S]
    tau = first[batch.sequence_ids]
    if scope == "sequence":
        return negative & (tau < NEVER)
    suffix = negative & (position > tau)
    return suffix & ~trigger if scope == "non_trigger_suffix" else suffix
