"""What the other segments of a sequence need to know of each: least and total log-ratio, tokens, first trigger."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megarl.kernels import library
from megarl.kernels.tokens import LOG_RATIO_LIMIT, STATISTICS_IN_TORCH, Tokens, check_backend

NEVER = 2**31 - 1  # index of a trigger that is not there


@dataclass(frozen=True)
class SegmentSummary:
    least: torch.Tensor  # [segments] float32, clamped log-ratio, inf without trained tokens
    sum: torch.Tensor  # [segments] float64, of the clamped log-ratios
    count: torch.Tensor  # [segments] int64, trained tokens
    first_trigger: torch.Tensor  # [segments] int32, from the segment's start, NEVER for none


def segment_summary(tokens: Tokens, veto_threshold: torch.Tensor, backend: str = "cpp") -> SegmentSummary:
    """A trigger is a trained token with A < 0 and ratio < veto_threshold (0-d float32 on the device). No gradient."""
    device = tokens.logprobs.device
    check_backend(backend, device)
    if backend in STATISTICS_IN_TORCH:
        return _segment_summary_torch(tokens, veto_threshold)
    dtypes = (torch.float32, torch.float64, torch.int64, torch.int32)
    out = SegmentSummary(*(torch.empty(tokens.segments, dtype=dtype, device=device) for dtype in dtypes))
    library.call("segment_summary", device, tokens.pointers(), veto_threshold, *vars(out).values())
    return out


def _segment_summary_torch(tokens: Tokens, veto_threshold: torch.Tensor) -> SegmentSummary:
    mask, cu_seqlens = tokens.mask, tokens.cu_seqlens.long()
    index = torch.arange(tokens.segments, device=mask.device)
    ids = torch.repeat_interleave(index, cu_seqlens.diff(), output_size=mask.numel())
    difference = torch.where(mask, tokens.logprobs.detach() - tokens.rollout_logprobs, 0)
    l = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    least = l.new_full((tokens.segments,), torch.inf)
    least.scatter_reduce_(0, ids, torch.where(mask, l, torch.inf), "amin")
    total = l.new_zeros(tokens.segments, dtype=torch.float64).index_add_(0, ids, l.double())
    count = torch.zeros_like(index).index_add_(0, ids, mask.long())
    trigger = mask & (tokens.advantages < 0) & (l.exp() < veto_threshold)
    position = torch.arange(mask.numel(), device=mask.device) - cu_seqlens[ids]
    first = torch.full_like(index, NEVER).scatter_reduce_(0, ids, torch.where(trigger, position, NEVER), "amin")
    return SegmentSummary(least, total, count, first.int())
