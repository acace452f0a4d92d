"""Summarises each segment for the other segments of its sequence, where context-parallel ranks share sequences.

`_in_torch` is the definition; the compiled kernels give the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megarl.kernels import library
from megarl.kernels.constants import NEVER
from megarl.kernels.tokens import STATISTICS_IN_TORCH, Tokens, check_backend


@dataclass(frozen=True)
class SegmentSummary:
    least: torch.Tensor  # [segments] float32, least clamped log-ratio; inf without trained tokens, NaN if one is NaN
    sum: torch.Tensor  # [segments] float64, sum of the clamped log-ratios
    count: torch.Tensor  # [segments] int64, number of trained tokens
    first_trigger: torch.Tensor  # [segments] int32, index from the segment's start, NEVER for none


def segment_summary(tokens: Tokens, veto_threshold: torch.Tensor, backend: str = "cpp") -> SegmentSummary:
    """The summary of every segment, without gradient.

    A trigger is a trained token with A < 0 and ratio < veto_threshold (0-d float32 on the device).
    """
    device = tokens.logprobs.device
    check_backend(backend, device)
    if backend in STATISTICS_IN_TORCH:
        return _in_torch(tokens, veto_threshold)
    dtypes = (torch.float32, torch.float64, torch.int64, torch.int32)
    out = SegmentSummary(*(torch.empty(tokens.segments, dtype=dtype, device=device) for dtype in dtypes))
    library.call("segment_summary", device, tokens.pointers(), veto_threshold, *vars(out).values())
    return out


def _in_torch(tokens: Tokens, veto_threshold: torch.Tensor) -> SegmentSummary:
    mask, ids, l = tokens.mask, tokens.segment_ids, tokens.log_ratio
    least = l.new_full((tokens.segments,), torch.inf)
    least.scatter_reduce_(0, ids, torch.where(mask, l, torch.inf), "amin")
    total = l.new_zeros(tokens.segments, dtype=torch.float64).index_add_(0, ids, l.double())
    count = ids.new_zeros(tokens.segments).index_add_(0, ids, mask.long())
    trigger = mask & (tokens.advantages < 0) & (l.exp() < veto_threshold)
    index = torch.arange(mask.numel(), device=mask.device) - tokens.cu_seqlens.long()[ids]
    first = ids.new_full((tokens.segments,), NEVER)
    first.scatter_reduce_(0, ids, torch.where(trigger, index, NEVER), "amin")
    return SegmentSummary(least, total, count, first.int())
