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
from megarl.kernels.second_moment import moment_histogram, moment_keys, moment_ties
from megarl.kernels.tokens import STATISTICS_IN_TORCH
from megarl.objectives.parts.fused import places_of, tokens_of
from megarl.objectives.parts.ratios import log_ratio
from megarl.objectives.parts.sequences import positions, sequence_ids
from megarl.objectives.parts.terms import trust_region

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


class TorchHistograms:
    """The tables of `megarl.kernels.second_moment` in plain torch: their definition."""

    def __init__(self, batch: TokenBatch) -> None:
        l, _ = log_ratio(batch.logprobs.detach(), batch.rollout_logprobs, batch.loss_mask)
        magnitude = l.abs().float().contiguous()
        self.squares = fixed_point(l)
        self.keys = torch.where(trust_region(l, batch), magnitude.view(torch.int32), -1).long()
        self.batch = batch

    def values(self, prefix: torch.Tensor, shift: int, bits: int) -> torch.Tensor:
        candidate = (self.keys >= 0) & (self.keys >> (shift + bits) == prefix >> (shift + bits))
        return self._table(self.keys >> shift, candidate, bits)

    def ties(self, key: torch.Tensor, prefix: torch.Tensor, shift: int, bits: int) -> torch.Tensor:
        order = tie_order(self.batch)
        candidate = (self.keys == key) & (order >> (shift + bits) == prefix >> (shift + bits))
        return self._table(order >> shift, candidate, bits)

    def _table(self, shifted: torch.Tensor, candidate: torch.Tensor, bits: int) -> torch.Tensor:
        bins = 1 << bits
        where = torch.where(candidate, shifted & (bins - 1), bins)
        table = self.squares.new_zeros(2, bins + 1)
        table[0].index_add_(0, where, torch.ones_like(where))
        table[1].index_add_(0, where, self.squares)
        return table[:, :bins].contiguous()


class KernelHistograms:
    """The same tables by the compiled kernels."""

    def __init__(self, batch: TokenBatch, backend: str) -> None:
        tokens = tokens_of(batch.detach())
        self.keys = moment_keys(tokens, backend)
        self.cu_seqlens, self.places, self.backend = tokens.cu_seqlens, places_of(batch), backend

    def values(self, prefix: torch.Tensor, shift: int, bits: int) -> torch.Tensor:
        return moment_histogram(self.keys, prefix, shift, bits, self.backend)

    def ties(self, key: torch.Tensor, prefix: torch.Tensor, shift: int, bits: int) -> torch.Tensor:
        return moment_ties(self.keys, key, self.places, self.cu_seqlens, prefix, shift, bits, self.backend)


def moment_histograms(batch: TokenBatch, backend: str) -> TorchHistograms | KernelHistograms:
    return TorchHistograms(batch) if backend in STATISTICS_IN_TORCH else KernelHistograms(batch, backend)


def select_second_moment(
    histograms: TorchHistograms | KernelHistograms, threshold: float, ordered: bool, group: ProcessGroup | None
) -> SecondMomentMask:
    """Algorithm 1 of M2PO: the largest l^2 leave until the mean over the others is at most `threshold`.

    Three all-reduces of 32 KiB, four more to order ties. Over a group, without ``sequence_index`` there is no order of
    ties that every split shares (not `ordered`): they leave together.
    """
    count = total = value = boundary = histograms.keys.new_zeros((), dtype=torch.int64)
    whole = []
    for shift, bits in _VALUE_DIGITS:
        table = _reduced(histograms.values(value, shift, bits), group)
        bin_, all_fit, count, total = _first_that_cannot_stay(table, count, total, threshold)
        value = value + (bin_ << shift)
        whole.append(all_fit)
    for shift, bits in _ORDER_DIGITS if ordered else ():
        table = _reduced(histograms.ties(value, boundary, shift, bits), group)
        bin_, _, count, total = _first_that_cannot_stay(table, count, total, threshold)
        boundary = boundary + (bin_ << shift)
    return SecondMomentMask(torch.where(whole[0], torch.inf, value.int().view(torch.float32)), boundary)


def _first_that_cannot_stay(
    table: torch.Tensor, count: torch.Tensor, total: torch.Tensor, threshold: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first bin that cannot stay whole, whether all can, and count and sum of all tokens below that bin."""
    counts, sums = count + table[0].cumsum(0), total + table[1].cumsum(0)
    fits = sums.double() <= threshold * _SCALE * counts.double()
    bin_ = fits.long().cumprod(0).sum()
    all_fit = bin_ == counts.numel()
    bin_ = bin_.clamp(max=counts.numel() - 1)
    below = (bin_ - 1).clamp(min=0)
    count = torch.where(bin_ > 0, counts.take(below), count)
    total = torch.where(bin_ > 0, sums.take(below), total)
    return bin_, all_fit, count, total


def winsorising_level(
    histograms: TorchHistograms | KernelHistograms, threshold: float, group: ProcessGroup | None
) -> torch.Tensor:
    """0-d float32 |l| at which the released code caps: the largest |l| in T such that mean_T min(l^2, cap^2)
    stays below `threshold`; 0 if there is none, inf if the plain mean is not above it. Three all-reduces of 32 KiB and
    one of a scalar."""
    keys = histograms.keys
    count = total = prefix = keys.new_zeros((), dtype=torch.int64)
    for level, (shift, bits) in enumerate(_VALUE_DIGITS):
        counts, sums = _reduced(histograms.values(prefix, shift, bits), group)
        if level == 0:
            number, budget = counts.sum(), threshold * _SCALE * counts.sum().double()
            within = sums.sum().double() <= budget
        below_count, below_sum = count + counts.cumsum(0) - counts, total + sums.cumsum(0) - sums
        edges = (prefix + (torch.arange(1 << bits, device=keys.device) << shift)).int().view(torch.float32)
        capped = below_sum.double() + (number - below_count).double() * fixed_point(edges).double()
        bin_ = ((capped < budget).long().cumprod(0).sum() - 1).clamp(min=0)  # the last edge that is below the budget
        count, total = below_count.take(bin_), below_sum.take(bin_)
        prefix = prefix + (bin_ << shift)
    # `prefix` is the largest float32 that would do; the released code takes the largest of the data
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


def fixed_point(l: torch.Tensor) -> torch.Tensor:
    """l^2 as int64 multiples of 2^-30; larger than any clamped log-ratio counts as 2^10."""
    return (l.detach().double().square().clamp(max=2.0**10) * _SCALE).round().long()
