"""Per-sequence views of the packed token axis, whole or sharded over context-parallel ranks.

Only per-sequence scalars travel between ranks, never log-probs; none of these carries gradient or waits for the device.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megarl.batch import ContextShard


def sequence_ids(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """[T] int64, the sequence each token belongs to."""
    lengths = cu_seqlens.diff().long()
    index = torch.arange(lengths.numel(), device=cu_seqlens.device)
    return torch.repeat_interleave(index, lengths, output_size=tokens)


def positions(cu_seqlens: torch.Tensor, tokens: int, shard: ContextShard | None) -> torch.Tensor:
    """[T] int64, the index of each token in its whole sequence."""
    ids = sequence_ids(cu_seqlens, tokens)
    local = torch.arange(tokens, device=cu_seqlens.device) - cu_seqlens.long()[ids]
    if shard is None:
        return local
    chunk = cu_seqlens.diff().long()[ids] // 2
    second = 2 * (shard.size - 1 - shard.rank) * chunk  # chunk 2 * size - 1 - r comes right after chunk r on this rank
    return local + shard.rank * chunk + torch.where(local >= chunk, second, 0)


def sequence_sum(values: torch.Tensor, cu_seqlens: torch.Tensor, shard: ContextShard | None) -> torch.Tensor:
    """[T, ...] -> [S, ...]: sums over each whole sequence; integers stay exact, floats are summed as float64."""
    values = values.detach()
    values = values.double() if values.is_floating_point() else values.long()
    sums = values.new_zeros(cu_seqlens.numel() - 1, *values.shape[1:])
    sums.index_add_(0, sequence_ids(cu_seqlens, values.shape[0]), values)
    if shard is not None:
        dist.all_reduce(sums, group=shard.group)
    return sums


def sequence_min(
    values: torch.Tensor, empty: int, cu_seqlens: torch.Tensor, shard: ContextShard | None
) -> torch.Tensor:
    """[T] int64 -> [S]: minimum over each whole sequence, `empty` where it has no tokens."""
    least = values.new_full((cu_seqlens.numel() - 1,), empty)
    least.scatter_reduce_(0, sequence_ids(cu_seqlens, values.numel()), values, "amin")
    if shard is not None:
        dist.all_reduce(least, dist.ReduceOp.MIN, group=shard.group)
    return least
