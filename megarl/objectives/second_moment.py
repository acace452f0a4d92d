"""M2PO's batch statistics by radix selection: exact over ranks, integer sums, no sort, no host sync.

Greedy removal of the largest squared log-ratio is a threshold on |l|: find the first token, in ascending order, that
cannot stay. The bit pattern of a non-negative float32 orders like its value, so three histograms (11 + 10 + 10 bits) of
counts and of sums of l^2 find it; sums are 64-bit integers (fixed point, 2^-30), which no split over ranks can change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megarl.batch import TokenBatch
from megarl.objectives.sequences import positions, sequence_ids

_SCALE = 2.0**30  # l^2 <= 400, so 2^24 tokens fit into an int64 sum
_VALUE_DIGITS = ((20, 11), (10, 10), (0, 10))  # (shift, bits) of the 31 value bits of |l|
_POSITION_BITS = 22
_ORDER_DIGITS = ((33, 11), (22, 11), (11, 11), (0, 11))


@dataclass(frozen=True)
class SecondMomentMask:
    """Trust-region tokens with |l| below `threshold` stay; those at it stay if their tie order is below `order`."""

    threshold: torch.Tensor  # 0-d float32, inf if all stay
    order: torch.Tensor  # 0-d int64

    def refused(self, l: torch.Tensor, trust: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
        """[T] bool, trust-region tokens that Algorithm 1 masks."""
        magnitude = l.detach().abs().float()
        late_tie = (magnitude == self.threshold) & (tie_order(batch) >= self.order)
        return trust & ((magnitude > self.threshold) | late_tie)


def tie_order(batch: TokenBatch) -> torch.Tensor:
    """[T] int64: which of equally large tokens go first, later ones in (sequence, position) order having lower values.

    Algorithm 1 removes one arg max at a time, the first of equals. ``sequence_index`` gives this order over ranks.
    """
    tokens = batch.loss_mask.numel()
    ids = sequence_ids(batch.cu_seqlens, tokens)
    sequence = ids if batch.sequence_index is None else batch.sequence_index[ids].long()
    place = (sequence << _POSITION_BITS) + positions(batch.cu_seqlens, tokens, batch.shard)
    return (1 << 2 * _POSITION_BITS) - 1 - place


def select_second_moment(
    l: torch.Tensor, trust: torch.Tensor, batch: TokenBatch, threshold: float, group: ProcessGroup | None
) -> SecondMomentMask:
    """Algorithm 1 of M2PO: the largest l^2 leave until the mean over the others is at most `threshold`.

    l [T], trust [T] bool: the set T. Three all-reduces of 32 KiB, four more to order ties. Over a group, without
    ``sequence_index`` there is no order of ties that every split shares: they leave together.
    """
    magnitude = l.detach().abs().float()
    squares = fixed_point(l)
    bits = magnitude.contiguous().view(torch.int32).long()
    digits = [(bits, digit) for digit in _VALUE_DIGITS]
    ordered = group is None or batch.sequence_index is not None
    if ordered:
        order = tie_order(batch)
        digits += [(order, digit) for digit in _ORDER_DIGITS]
    candidate, count, total = trust, squares.new_zeros(()), squares.new_zeros(())
    found, whole = [], []
    for key, (shift, width) in digits:
        digit = (key >> shift) & ((1 << width) - 1)
        counts, sums = _histogram(digit, squares, candidate, 1 << width, group)
        counts, sums = count + counts.cumsum(0), total + sums.cumsum(0)  # of all tokens up to and with each bin
        fits = sums.double() <= threshold * _SCALE * counts.double()
        bin_ = fits.long().cumprod(0).sum()  # the first bin that cannot stay whole
        whole.append(bin_ == counts.numel())
        bin_ = bin_.clamp(max=counts.numel() - 1)
        below = (bin_ - 1).clamp(min=0)
        count = torch.where(bin_ > 0, counts.take(below), count)
        total = torch.where(bin_ > 0, sums.take(below), total)
        candidate = candidate & (digit == bin_)
        found.append(bin_ << shift)
    value = (found[0] + found[1] + found[2]).int().view(torch.float32)
    boundary = found[3] + found[4] + found[5] + found[6] if ordered else squares.new_zeros(())
    return SecondMomentMask(torch.where(whole[0], torch.inf, value), boundary)


def winsorising_level(
    l: torch.Tensor, trust: torch.Tensor, threshold: float, group: ProcessGroup | None
) -> torch.Tensor:
    """0-d float32 |l| at which the released code caps: the largest |l| in T such that mean_T min(l^2, cap^2)
    stays below `threshold`; 0 if there is none, inf if the plain mean is not above it. Three all-reduces of 32 KiB and
    one of a scalar."""
    magnitude = l.detach().abs().float()
    squares = fixed_point(l)
    bits = magnitude.contiguous().view(torch.int32).long()
    candidate, count, total = trust, squares.new_zeros(()), squares.new_zeros(())
    prefix = squares.new_zeros(())
    for level, (shift, width) in enumerate(_VALUE_DIGITS):
        digit = (bits >> shift) & ((1 << width) - 1)
        counts, sums = _histogram(digit, squares, candidate, 1 << width, group)
        if level == 0:
            number, budget = counts.sum(), threshold * _SCALE * counts.sum().double()
            within = sums.sum().double() <= budget
        below_count, below_sum = count + counts.cumsum(0) - counts, total + sums.cumsum(0) - sums
        edges = (prefix + (torch.arange(1 << width, device=l.device) << shift)).int().view(torch.float32)
        capped = below_sum.double() + (number - below_count).double() * fixed_point(edges).double()
        bin_ = ((capped < budget).long().cumprod(0).sum() - 1).clamp(min=0)  # the last edge that is below the budget
        count, total = below_count.take(bin_), below_sum.take(bin_)
        candidate = candidate & (digit == bin_)
        prefix = prefix + (bin_ << shift)
    # `prefix` is the largest float32 that would do; the released code takes the largest of the data
    cap = torch.where(trust & (bits <= prefix), magnitude, 0).amax() if l.numel() else magnitude.new_zeros(())
    cap = torch.where(budget > 0, cap, 0)
    if group is not None:
        dist.all_reduce(cap, dist.ReduceOp.MAX, group=group)
    return torch.where(within, torch.inf, cap)


def fixed_point(l: torch.Tensor) -> torch.Tensor:
    """l^2 as int64 multiples of 2^-30; larger than any clamped log-ratio counts as 2^10."""
    return (l.detach().double().square().clamp(max=2.0**10) * _SCALE).round().long()


def _histogram(
    digit: torch.Tensor, squares: torch.Tensor, candidate: torch.Tensor, bins: int, group: ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and sums [bins] int64 of the candidate tokens over all ranks."""
    table = squares.new_zeros(2, bins + 1)
    where = torch.where(candidate, digit, bins)
    table[0].index_add_(0, where, torch.ones_like(where))
    table[1].index_add_(0, where, squares)
    table = table[:, :bins].contiguous()
    if group is not None:
        dist.all_reduce(table, group=group)
    return table[0], table[1]
