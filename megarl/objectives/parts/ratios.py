"""Importance ratios in log space, with the same clamp and the same sign (current minus anchor) everywhere."""

from __future__ import annotations

import torch

from megarl.batch import TokenBatch
from megarl.kernels.constants import LOG_RATIO_LIMIT
from megarl.objectives.parts.sequences import sequence_sum


def log_ratio(
    logprobs: torch.Tensor, anchor: torch.Tensor, loss_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """l = logprobs - anchor, clamped to +-LOG_RATIO_LIMIT, 0 where not trained; and [T] bool where it was clamped.

    Gradient flows into logprobs where l was not clamped. Values of untrained tokens are ignored, NaN included.
    """
    raw = torch.where(loss_mask, logprobs, 0) - torch.where(loss_mask, anchor.detach(), 0)
    return raw.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), raw.detach().abs() > LOG_RATIO_LIMIT


def sequence_log_ratio(l: torch.Tensor, batch: TokenBatch, mean: bool) -> torch.Tensor:
    """[S] float32 without gradient: sum of l over the trained tokens of each response, or mean, 0 for none."""
    mask = batch.loss_mask
    sums = sequence_sum(torch.where(mask, l.detach(), 0), batch.cu_seqlens, batch.shard)
    if mean:
        sums = sums / sequence_sum(mask, batch.cu_seqlens, batch.shard).clamp(min=1)
    return sums.to(l.dtype)
