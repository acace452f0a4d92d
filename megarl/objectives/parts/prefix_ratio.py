"""rho_{1:t}, the importance ratio of a whole prefix, in log space; bitwise the same for every split over ranks.

Log-ratios are rounded to integer multiples of 2^-32, whose sums do not depend on the order. The rounding loses no more
than float32 arithmetic would.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megarl.batch import TokenBatch, segment_ids

SCALE = 2.0**32  # with |l| <= 20 and at most 2^22 tokens per sequence, sums stay below 2^59
DIGITS = tuple(range(48, -1, -12))  # shifts of the 12-bit digits of a radix selection over 60 bits
OFFSET = 1 << 59  # added to sums to make them positive


def prefix_sums(l: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """[T] log-ratios -> [T] int64, SCALE times the sum over the trained tokens of the response up to and including each
    token.

    A NaN counts as 0. With a shard: one all-gather of [S, 2] sums.
    """
    steps = torch.where(batch.loss_mask, l.detach().double().nan_to_num() * SCALE, 0).round().long()
    sums = steps.cumsum(0)
    ids = segment_ids(batch.segments, steps.numel())
    starts = batch.segments[:-1].long()
    before = torch.cat([sums.new_zeros(1), sums])[starts]  # sum over all earlier segments
    sums = sums - before[ids]
    if batch.shard is None:
        return sums
    of_chunks = sums.new_zeros(starts.numel()).index_add_(0, ids, steps).view(-1, 2)
    gathered = [torch.empty_like(of_chunks) for _ in range(batch.shard.size)]
    dist.all_gather(gathered, of_chunks, group=batch.shard.group)
    in_order = batch.shard.in_order(torch.stack(gathered).transpose(1, 2))  # [chunks, S]
    earlier = in_order.cumsum(0) - in_order
    return sums + torch.stack([earlier[chunk] for chunk in batch.shard.held], 1).flatten()[ids]


def prefix_log_ratio(l: torch.Tensor, batch: TokenBatch, exclusive: bool = False) -> torch.Tensor:
    """[T] without gradient, dtype of l: the sum over the trained tokens of the response up to t, for log-ratios log
    rho_{1:t}; with ``exclusive`` over the tokens before t only.

    NaN where l itself is NaN.
    """
    sums = prefix_sums(l, batch)
    if exclusive:
        sums = sums - torch.where(batch.loss_mask, l.detach().double().nan_to_num() * SCALE, 0).round().long()
    return (sums.double() / SCALE).to(l.dtype) + 0 * l.detach()


def lowest_threshold(
    sums: torch.Tensor,  # [T] int64 of `prefix_sums`
    mask: torch.Tensor,  # [T] bool, the tokens that are ranked
    fraction: float,
    group: ProcessGroup | None,
) -> torch.Tensor:
    """0-d int64 threshold: the tokens with sums below it are the lowest ``fraction`` of all ranks' n tokens, at most
    floor(fraction n).

    It is the lowest sum that is not filtered out, so all tokens with the same sum stay. Radix selection: one all-reduce
    of a scalar and five of 32 KiB; no host sync.
    """
    keys = sums + OFFSET
    total = mask.sum()
    if group is not None:
        dist.all_reduce(total, group=group)
    rank = (total.double() * fraction).floor().long()  # number of tokens that may go; the key with this rank stays
    prefix = torch.zeros_like(total)
    for shift in DIGITS:
        inside = mask & ((keys >> (shift + 12)) == (prefix >> (shift + 12)))
        bins = torch.where(inside, (keys >> shift) & 4095, 4096)
        table = keys.new_zeros(4097).index_add_(0, bins, torch.ones_like(bins))[:-1]
        if group is not None:
            dist.all_reduce(table, group=group)
        below = table.cumsum(0) - table
        # the last non-empty bin that begins at or before the rank
        bin_ = ((below <= rank).long() * (table > 0)).cumsum(0).argmax()
        rank = rank - below.take(bin_)
        prefix = prefix + (bin_ << shift)
    return prefix - OFFSET
