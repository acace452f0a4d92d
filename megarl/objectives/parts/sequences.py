"""Sums and minima over whole sequences of the packed token axis, also where ranks share sequences.

Only per-sequence scalars travel between ranks, never log-probs; nothing carries gradient or waits for the device.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megarl.batch import ContextShard, segment_ids


def sequence_sum(values: torch.Tensor, cu_seqlens: torch.Tensor, shard: ContextShard | None) -> torch.Tensor:
    """[T, ...] -> [S, ...]: sums over each whole sequence; integers stay exact, floats are summed as float64."""
    values = values.detach()
    values = values.double() if values.is_floating_point() else values.long()
    sums = values.new_zeros(cu_seqlens.numel() - 1, *values.shape[1:])
    sums.index_add_(0, segment_ids(cu_seqlens, values.shape[0]), values)
    if shard is not None:
        dist.all_reduce(sums, group=shard.group)
    return sums


def sequence_min(
    values: torch.Tensor, empty: int, cu_seqlens: torch.Tensor, shard: ContextShard | None
) -> torch.Tensor:
    """[T] int64 -> [S]: minimum over each whole sequence, `empty` where it has no tokens."""
    least = values.new_full((cu_seqlens.numel() - 1,), empty)
    least.scatter_reduce_(0, segment_ids(cu_seqlens, values.numel()), values, "amin")
    if shard is not None:
        dist.all_reduce(least, dist.ReduceOp.MIN, group=shard.group)
    return least
