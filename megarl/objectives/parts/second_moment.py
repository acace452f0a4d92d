"""M2PO's batch statistics by radix selection: exact over ranks, integer sums, no sort, no host sync.

Greedy removal of the largest squared log-ratios amounts to a threshold on |l|: that of the first token, in ascending
order, that must go. The bit pattern of a non-negative float32 sorts like its value, so three histograms (11 + 10 + 10
bits) of counts and of sums of l^2 find it. The sums are 64-bit integers (fixed point, 2^-30), so no split over ranks
changes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megarl.batch import TokenBatch
from megarl.kernels.constants import SQUARE_SCALE
from megarl.kernels.second_moment import fixed_point, moment_histogram, moment_keys, moment_ties
from megarl.kernels.tokens import Tokens, tie_places

_VALUE_DIGITS = ((20, 11), (10, 10), (0, 10))  # (shift, bits) of the digits of |l|, 31 bits
_ORDER_DIGITS = ((33, 11), (22, 11), (11, 11), (0, 11))  # likewise of a tie order, 2 * POSITION_BITS bits


@dataclass(frozen=True)
class SecondMomentMask:
    """Trust-region tokens are kept if |l| is below `threshold`, or equal to it with a tie order below `order`."""

    threshold: torch.Tensor  # 0-d float32, inf if all are kept
    order: torch.Tensor  # 0-d int64


class Histograms:
    """Computes the histograms of `megarl.kernels.second_moment` for one rank's tokens."""

    def __init__(self, batch: TokenBatch, backend: str) -> None:
        self.tokens, self.places, self.backend = Tokens.of(batch.detach()), tie_places(batch), backend
        self.keys = moment_keys(self.tokens, backend)

    def values(self, prefix: torch.Tensor, shift: int, bits: int) -> torch.Tensor:
        """Histogram by the keys that agree with `prefix`, see `moment_histogram`."""
        return moment_histogram(self.keys, prefix, shift, bits, self.backend)

    def ties(self, key: torch.Tensor, prefix: torch.Tensor, shift: int, bits: int) -> torch.Tensor:
        """Histogram by the tie orders of the tokens with `key`, see `moment_ties`."""
        return moment_ties(self.keys, key, self.places, self.tokens, prefix, shift, bits, self.backend)


def select_second_moment(
    histograms: Histograms, threshold: float, ordered: bool, group: ProcessGroup | None
) -> SecondMomentMask:
    """Algorithm 1 of M2PO: remove the largest l^2 until the mean over the others is at most `threshold`.

    ordered: whether to break ties; False if there is no order that all splits over ranks share (a group of ranks
    without ``sequence_index``): then ties are removed together. Three all-reduces of 32 KiB, and four more for ties.
    """
    count = total = value = boundary = histograms.keys.new_zeros((), dtype=torch.int64)
    whole = []
    for shift, bits in _VALUE_DIGITS:
        table = _reduced(histograms.values(value, shift, bits), group)
        bin_, all_fit, count, total = _first_bin_to_cut(table, count, total, threshold)
        value = value + (bin_ << shift)
        whole.append(all_fit)
    for shift, bits in _ORDER_DIGITS if ordered else ():
        table = _reduced(histograms.ties(value, boundary, shift, bits), group)
        bin_, _, count, total = _first_bin_to_cut(table, count, total, threshold)
        boundary = boundary + (bin_ << shift)
    return SecondMomentMask(torch.where(whole[0], torch.inf, value.int().view(torch.float32)), boundary)


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


def winsorising_level(histograms: Histograms, threshold: float, group: ProcessGroup | None) -> torch.Tensor:
    """0-d float32 |l| at which the released code clips: the largest |l| in the trust region T such that
    mean_T min(l^2, level^2) stays below `threshold`; 0 if there is none, inf if the mean of l^2 itself is at most
    `threshold`. Three all-reduces of 32 KiB and one of a scalar."""
    keys = histograms.keys
    count = total = prefix = keys.new_zeros((), dtype=torch.int64)
    for level, (shift, bits) in enumerate(_VALUE_DIGITS):
        counts, sums = _reduced(histograms.values(prefix, shift, bits), group)
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
