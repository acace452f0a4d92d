"""m_t, the smallest importance ratio of a token's prefix, in log space, also where ranks share sequences."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from megarl.batch import ContextShard, TokenBatch, segment_ids

_NONE = 0x7FFFFFFF  # key above that of +infinity: no trained token so far
_NAN = -1  # bit pattern of a NaN, whose key is the lowest of all


def prefix_min_log_ratio(l: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """[T] without gradient: log m_t, m_t = min over the earlier trained tokens of the response, 1 for the first.

    A trained NaN makes log m_t NaN for every later token of its response, on whichever rank; untrained tokens influence
    nothing. Over a shard: one all-gather of [S, 2] minima.
    """
    values, shard = l.detach().float(), batch.shard
    if shard is None:
        return exclusive_min(values, batch.loss_mask, batch.cu_seqlens).to(l.dtype)
    ids = segment_ids(batch.segments, values.numel())
    minima = values.new_full((batch.segments.numel() - 1,), math.inf)
    minima.scatter_reduce_(0, ids, torch.where(batch.loss_mask, values, math.inf), "amin")
    before = min_of_earlier_chunks(minima.view(-1, 2), shard).flatten()
    return exclusive_min(values, batch.loss_mask, batch.segments, before).to(l.dtype)


def exclusive_min(
    log_ratio: torch.Tensor,  # [T] float32
    mask: torch.Tensor,  # [T] bool, True = trained
    boundaries: torch.Tensor,  # [segments + 1], from 0 to T
    before: torch.Tensor | None = None,  # [segments] float32, minimum of what precedes each segment, inf for nothing
) -> torch.Tensor:
    """[T] float32: minimum of log_ratio over the earlier trained tokens of the segment and `before`, 0 for none.

    One cummin over integer keys that sort like the floats, minus segment * 2^32, so that it starts afresh in each.
    """
    ids = segment_ids(boundaries, mask.numel())
    offset = ids << 32
    inclusive = (torch.where(mask, _to_key(log_ratio), _NONE) - offset).cummin(0).values
    # On the first token of a segment the sum is beyond 2^31: it comes from an earlier segment, and becomes _NONE.
    exclusive = torch.cat([inclusive.new_full((1,), _NONE), inclusive])[:-1] + offset
    least = exclusive.clamp(max=_NONE)
    if before is not None:
        least = torch.minimum(least, torch.where(before == math.inf, _NONE, _to_key(before))[ids])
    return torch.where(least == _NONE, 0.0, _from_key(least))


def min_of_earlier_chunks(minima: torch.Tensor, shard: ContextShard) -> torch.Tensor:
    """Minima [S, 2] of this rank's two chunks of each sequence -> [S, 2], minimum of all chunks before each; inf for
    none, NaN where one of them is NaN. One all-gather."""
    gathered = [torch.empty_like(minima) for _ in range(shard.size)]
    dist.all_gather(gathered, minima.contiguous(), group=shard.group)
    in_order = shard.in_order(torch.stack(gathered).transpose(1, 2))  # [chunks, S]
    before = torch.cat([torch.full_like(in_order[:1], math.inf), in_order.cummin(0).values[:-1]])
    return torch.stack([before[chunk] for chunk in shard.held], 1)


def _to_key(values: torch.Tensor) -> torch.Tensor:
    """float32 -> int64 in [-2^31, 2^31) that sorts like it; NaN is the lowest, -0.0 just below 0.0."""
    bits = torch.where(values.isnan(), _NAN, values.contiguous().view(torch.int32))
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()


def _from_key(keys: torch.Tensor) -> torch.Tensor:
    keys = keys.int()
    return torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys).view(torch.float32)
