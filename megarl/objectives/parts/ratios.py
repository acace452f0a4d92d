"""Importance ratios in log space: one clamp, one sign (current minus anchor) everywhere."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from megarl.batch import ContextShard, TokenBatch
from megarl.kernels.prefix_min import prefix_min
from megarl.kernels.tokens import LOG_RATIO_LIMIT
from megarl.objectives.parts.sequences import sequence_ids, sequence_sum


def log_ratio(
    logprobs: torch.Tensor, anchor: torch.Tensor, loss_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """l = logprobs - anchor, clamped to +-LOG_RATIO_LIMIT, 0 where not trained; and [T] bool where the clamp bites.

    Gradient flows into logprobs where the clamp does not bite. Untrained values may be anything, NaN included.
    """
    raw = torch.where(loss_mask, logprobs, 0) - torch.where(loss_mask, anchor.detach(), 0)
    return raw.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), raw.detach().abs() > LOG_RATIO_LIMIT


def sequence_log_ratio(l: torch.Tensor, batch: TokenBatch, mean: bool) -> torch.Tensor:
    """[T] float32 without gradient: sum (or mean) of l over the trained tokens of the token's response."""
    mask = batch.loss_mask
    sums = sequence_sum(torch.where(mask, l.detach(), 0), batch.cu_seqlens, batch.shard)
    if mean:
        sums = sums / sequence_sum(mask, batch.cu_seqlens, batch.shard).clamp(min=1)
    return sums[sequence_ids(batch.cu_seqlens, mask.numel())].to(l.dtype)


def prefix_min_log_ratio(l: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """[T] without gradient: log m_t, m_t = min over earlier trained tokens of the response; 0 (m = 1) for the first.

    Without a shard it is `megarl.kernels.prefix_min`; with one, each chunk continues the minimum of those before it.
    """
    values = l.detach().float()
    if batch.shard is None:
        return prefix_min(values, batch.loss_mask, batch.cu_seqlens.int()).to(l.dtype)
    values = torch.where(batch.loss_mask, values, math.inf)
    ids = sequence_ids(batch.cu_seqlens, values.numel())
    least = _sharded_running_min(values, ids, batch.cu_seqlens, batch.shard)
    return torch.where(least == math.inf, 0, least).to(l.dtype)


def _exclusive_running_min(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[T] float32, [T] non-decreasing segment ids -> minimum over the earlier tokens of the segment, inf for none."""
    if values.numel() == 0:
        return values
    offset = ids << 32
    inclusive = _from_ordered((_to_ordered(values) - offset).cummin(0).values + offset)
    shifted = torch.cat([inclusive.new_full((1,), math.inf), inclusive[:-1]])
    first = torch.cat([ids.new_full((1,), -1), ids[:-1]]) != ids
    return torch.where(first, math.inf, shifted)


def _to_ordered(values: torch.Tensor) -> torch.Tensor:
    """float32 -> int64 in [-2^31, 2^31) with the same order; -0.0 sorts just below 0.0."""
    bits = values.contiguous().view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()


def _from_ordered(keys: torch.Tensor) -> torch.Tensor:
    keys = keys.int()
    return torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys).view(torch.float32)


def _sharded_running_min(
    values: torch.Tensor, ids: torch.Tensor, cu_seqlens: torch.Tensor, shard: ContextShard
) -> torch.Tensor:
    """As `_exclusive_running_min`, each sequence cut into zigzag chunks: one all-gather of [S, 2] chunk minima."""
    sequences = cu_seqlens.numel() - 1
    local = torch.arange(values.numel(), device=values.device) - cu_seqlens.long()[ids]
    half = (local >= cu_seqlens.diff().long()[ids] // 2).long()
    chunk = 2 * ids + half  # [T], non-decreasing
    minima = values.new_full((2 * sequences,), math.inf).scatter_reduce_(0, chunk, values, "amin").view(sequences, 2)
    return torch.minimum(_exclusive_running_min(values, chunk), chunk_carry(minima, shard).flatten()[chunk])


def chunk_carry(minima: torch.Tensor, shard: ContextShard) -> torch.Tensor:
    """Minima [S, 2] of this rank's two chunks of each sequence -> [S, 2], minimum of all chunks before each; inf for
    none. One all-gather."""
    gathered = [torch.empty_like(minima) for _ in range(shard.size)]
    dist.all_gather(gathered, minima.contiguous(), group=shard.group)
    table = torch.cat(
        [torch.stack([g[:, 0] for g in gathered], 1), torch.stack([g[:, 1] for g in gathered], 1).flip(1)], 1
    )  # [S, 2 * size], in the order of the sequence
    before = torch.cat([torch.full_like(table[:, :1], math.inf), table.cummin(1).values[:, :-1]], 1)
    return torch.stack([before[:, shard.rank], before[:, 2 * shard.size - 1 - shard.rank]], 1)
