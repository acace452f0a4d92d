"""M2PO's batch statistics by radix selection: exact over ranks, integer sums, no sort, no host sync.

Greedy removal of the largest squared log-ratios amounts to a threshold on |l|: that of the first token, in ascending
order, that must go. The bit pattern of a non-negative float32 sorts like its value, so three histograms (11 + 10 + 10
bits) of counts and of sums of l^2 find it. The sums are 64-bit integers (fixed point, 2^-30), so no split over ranks
changes them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megarl.batch import TokenBatch
from megarl.kernels.constants import SQUARE_SCALE
from megarl.kernels.second_moment import fixed_point, moment_histogram, moment_keys, moment_ties
from megarl.kernels.tokens import Tokens, tie_places

_VALUE_DIGITS = ((20, 11), (10, 10), (0, 10))  # (shift, bits) of the digits of |l|, 31 bits
_ORDER_DIGITS = ((33, 11), (22, 11), (11, 11), (0, 11))  # likewise of a tie order, 2 * POSITION_BITS bits


def select_second_moment(
    batch: TokenBatch, threshold: float, group: ProcessGroup | None, backend: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Algorithm 1 of M2PO: remove the largest l^2 until the mean over the others is at most `threshold`.

    Returns 0-d float32 |l|, inf if all tokens stay, and 0-d int64 tie order: a trust-region token stays if its |l| is
    below the former, or equal to it with a tie order below the latter. A group of ranks without ``sequence_index`` has
    no order that all splits over ranks share: then ties are removed together. Three all-reduces of 32 KiB, and four
    more for ties.
    """
    tokens, places = Tokens.of(batch), tie_places(batch)
    keys = moment_keys(tokens, backend)
    count = total = value = boundary = keys.new_zeros((), dtype=torch.int64)
    whole = []
    for shift, bits in _VALUE_DIGITS:
        table = _reduced(moment_histogram(keys, value, shift, bits, backend), group)
        bin_, all_fit, count, total = _first_bin_to_cut(table, count, total, threshold)
        value = value + (bin_ << shift)
        whole.append(all_fit)
    for shift, bits in _ORDER_DIGITS if group is None or batch.sequence_index is not None else ():
        table = _reduced(moment_ties(keys, value, places, tokens, boundary, shift, bits, backend), group)
        bin_, _, count, total = _first_bin_to_cut(table, count, total, threshold)
        boundary = boundary + (bin_ << shift)
    return torch.where(whole[0], torch.inf, value.int().view(torch.float32)), boundary


def _first_bin_to_cut(
    table: torch.Tensor, count: torch.Tensor, total: torch.Tensor, threshold: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first bin that cannot be kept as a whole; whether all bins can; count and sum of all tokens below that bin.

    table: [2, bins] counts and sums; count, total: those of the tokens below the whole table."""
    counts, sums = count + table[0].cumsum(0), total + table[1].cumsum(0)
    fits = sums.double() <= threshold * SQUARE_SCALE * counts.double()
    bin_ = fits.long().cumprod(0).sum()
    all_fit = bin_ == counts.numel()
    bin_ = bin_.clamp(max=counts.numel() - 1)
    below = (bin_ - 1).clamp(min=0)
    count = torch.where(bin_ > 0, counts.take(below), count)
    total = torch.where(bin_ > 0, sums.take(below), total)
    return bin_, all_fit, count, total


def winsorising_level(batch: TokenBatch, threshold: float, group: ProcessGroup | None, backend: str) -> torch.Tensor:
    """0-d float32 |l| at which the released code clips: the largest |l| in the trust region T such that
    mean_T min(l^2, level^2) stays below `threshold`; 0 if there is none, inf if the mean of l^2 itself is at most
    `threshold`. Three all-reduces of 32 KiB and one of a scalar."""
    keys = moment_keys(Tokens.of(batch), backend)
    count = total = prefix = keys.new_zeros((), dtype=torch.int64)
    for level, (shift, bits) in enumerate(_VALUE_DIGITS):
        counts, sums = _reduced(moment_histogram(keys, prefix, shift, bits, backend), group)
        if level == 0:
            number, budget = counts.sum(), threshold * SQUARE_SCALE * counts.sum().double()
            within = sums.sum().double() <= budget
        below_count, below_sum = count + counts.cumsum(0) - counts, total + sums.cumsum(0) - sums
        edges = (prefix + (torch.arange(1 << bits, device=keys.device) << shift)).int().view(torch.float32)
        capped = below_sum.double() + (number - below_count).double() * fixed_point(edges).double()
        bin_ = ((capped < budget).long().cumprod(0).sum() - 1).clamp(min=0)  # the last edge that is below the budget
        count, total = below_count.take(bin_), below_sum.take(bin_)
        prefix = prefix + (bin_ << shift)
    # `prefix` is the largest float32 that satisfies this; the released code takes the largest |l| of the data that does
    found = torch.where((keys >= 0) & (keys <= prefix), keys, 0)
    cap = (found.amax() if found.numel() else prefix.new_zeros(())).int().view(torch.float32)
    cap = torch.where(budget > 0, cap, 0)
    if group is not None:
        dist.all_reduce(cap, dist.ReduceOp.MAX, group=group)
    return torch.where(within, torch.inf, cap)


def _reduced(table: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(table, group=group)
    return table
