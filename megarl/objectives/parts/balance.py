"""BAPO's search for clip bounds: one binned pass over the fixed path of states that its loop can visit.

For A > 0 a token contributes w A min(rho, c_high), for A < 0 it contributes w |A| max(rho, c_low): each is linear
between two grid points, so per-bin sums of w and w rho give the contribution at every state. Sums are exact integers.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megarl.batch import TokenBatch
from megarl.kernels.contributions import binned_contributions
from megarl.kernels.tokens import STATISTICS_IN_TORCH
from megarl.objectives.parts.fused import tokens_of
from megarl.objectives.parts.ratios import log_ratio

_LIMB_BITS = 24  # a float64 contribution is cut into three integers, each of which sums exactly
_LARGEST = 2.0**38  # a contribution beyond is counted as this; 2^24 of them fit into an int64


def grid(start: float, end: float, step: float, device: torch.device, cut: bool = False) -> torch.Tensor:
    """start, start + step, ... up to end, float64; `cut`: one shorter step reaches end. Steps are counted, since adding
    floats would lose the last one."""
    steps = (end - start) / step
    count = math.ceil(steps - 1e-9) if cut else math.floor(steps + 1e-9)
    points = start + step * torch.arange(count + 1, dtype=torch.float64, device=device)
    return points.clamp(max=end) if cut else points


def path(first: int, second: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Grid indices [first + second - 1] of the states in order: one bound walks to its end, then the other."""
    step = torch.arange(first + second - 1, device=device)
    return step.clamp(max=first - 1), (step - first + 1).clamp(min=0)


def contributions(
    batch: TokenBatch,
    low: torch.Tensor,  # [L] float64, ascending
    high: torch.Tensor,  # [H] float64, ascending
    weighted: bool,  # w = pi_rollout, else 1
    group: ProcessGroup | None,
    backend: str = "torch",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of w A min(rho, c_high) over A > 0 for every high [H], and of w |A| max(rho, c_low) over A < 0 for every low
    [L], float64, over all ranks: one all-reduce of 6 (H + L + 4) int64."""
    highs = high.numel()
    if backend in STATISTICS_IN_TORCH:
        table = _binned(batch, low, high, weighted)
    else:
        table = binned_contributions(tokens_of(batch), low, high, weighted, backend)
    if group is not None:
        dist.all_reduce(table, group=group)
    m, mr = (sum(part[i].double() * 2.0 ** (-i * _LIMB_BITS) for i in range(3)) for part in table.split(3))
    m_high, mr_high = m[: highs + 1], mr[: highs + 1]
    m_low, mr_low = m[highs + 2 : -1], mr[highs + 2 : -1]
    above = m_high.sum() - m_high.cumsum(0)[:-1]
    at_high = mr_high.cumsum(0)[:-1] + high * above
    at_low = low * m_low.cumsum(0)[:-1] + (mr_low.sum() - mr_low.cumsum(0)[:-1])
    return at_high, at_low


def _binned(batch: TokenBatch, low: torch.Tensor, high: torch.Tensor, weighted: bool) -> torch.Tensor:
    """[6, H + L + 4] int64, see `megarl.kernels.contributions`."""
    lows, highs, mask, advantages = low.numel(), high.numel(), batch.loss_mask, batch.advantages
    l, _ = log_ratio(batch.logprobs.detach(), batch.rollout_logprobs, mask)
    r, mass = l.exp().double(), torch.where(mask, advantages, 0).double().abs()
    if weighted:
        mass = mass * torch.where(mask, batch.rollout_logprobs, 0).double().exp()
    positive, negative = (advantages > 0) & mask, (advantages < 0) & mask
    bins_high = torch.where(positive, torch.bucketize(r, high), highs + 1)  # bin i: high[i-1] < r <= high[i]
    bins_low = torch.where(negative, torch.bucketize(r, low), lows + 1) + highs + 2
    where = torch.where(positive, bins_high, bins_low)
    limbs = torch.cat([_limbs(mass), _limbs(mass * r)])  # [6, T]
    return limbs.new_zeros(6, highs + lows + 4).index_add_(1, where, limbs)


def _limbs(values: torch.Tensor) -> torch.Tensor:
    """[T] float64 >= 0 -> [3, T] int64: limb i counts multiples of 2^(-24 i); exact to 2^-49."""
    rest, limbs = torch.nan_to_num(values).clamp(max=_LARGEST), []
    for _ in range(2):
        limbs.append(rest.floor())
        rest = (rest - limbs[-1]) * 2.0**_LIMB_BITS
    return torch.stack([*limbs, rest.round()]).long()
