"""Histograms of log-ratios, whose counts can be added over ranks and micro-batches: 16 bins per octave of |l|.

The bin is taken from the upper bits of |l| in float32.
"""

from __future__ import annotations

import math
import struct

import torch

from megarl.kernels.constants import BINS, BINS_PER_SIGN, HISTOGRAM_BASE, HISTOGRAM_SHIFT, LOG_RATIO_LIMIT

QUANTILES = (0.0, 0.01, 0.05, 0.5, 0.95, 0.99, 1.0)


def histogram(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """[T] log-ratios, [T] bool -> counts [BINS] int64; bin BINS_PER_SIGN holds 0, higher bins larger values."""
    magnitude = values.detach().float().abs().contiguous().view(torch.int32).long()
    step = ((magnitude >> HISTOGRAM_SHIFT) - HISTOGRAM_BASE).clamp(0, BINS_PER_SIGN)
    index = torch.where(where, BINS_PER_SIGN + torch.where(values < 0, -step, step), BINS)
    counts = torch.zeros(BINS + 1, dtype=torch.int64, device=values.device)
    return counts.index_add_(0, index, torch.ones_like(index))[:-1]


def quantiles(counts: torch.Tensor, levels: tuple[float, ...] = QUANTILES) -> list[float]:
    """Quantiles of the log-ratio (the smallest value with at least the given share of values at or below it), exact to
    half a bin: 3.1 % of the log-ratio, or 2^-14 nats. NaN for an empty histogram."""
    cumulative = counts.double().cumsum(0)
    total = float(cumulative[-1])
    if total == 0:
        return [math.nan] * len(levels)
    wanted = torch.tensor([max(q * total, 1.0) for q in levels], dtype=torch.float64, device=counts.device)
    index = torch.searchsorted(cumulative, wanted - 1e-9 * total).clamp(max=BINS - 1)
    return [_centre(i - BINS_PER_SIGN) for i in index.tolist()]


def outer_edges(counts: torch.Tensor) -> tuple[float, float]:
    """Lower and upper bound of all counted log-ratios, from the outermost non-empty bins."""
    used = counts.nonzero().flatten().tolist() or [BINS_PER_SIGN]
    low, high = used[0] - BINS_PER_SIGN, used[-1] - BINS_PER_SIGN
    return -_edge(max(-low, 0) + 1), _edge(max(high, 0) + 1)


def _edge(step: int) -> float:
    """Lower edge of |l| of the bin `step` bins from 0; the last bin ends at the limit."""
    if step > BINS_PER_SIGN:
        return LOG_RATIO_LIMIT
    return float(struct.unpack("<f", struct.pack("<i", (step + HISTOGRAM_BASE) << HISTOGRAM_SHIFT))[0])


def _centre(step: int) -> float:
    return math.copysign((_edge(abs(step)) + _edge(abs(step) + 1)) / 2, step) if step else 0.0
