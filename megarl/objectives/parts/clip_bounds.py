"""BAPO's search for clip bounds: its loop visits states on one fixed path, so one binned pass evaluates them all.

A state is a pair (c_low, c_high) of grid points. For A > 0 a token contributes w A min(rho, c_high), for A < 0
w |A| max(rho, c_low). Each is linear between two grid points, so per-bin sums of w |A| and w |A| rho give the
contribution at every state. Sums are exact integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megarl.batch import TokenBatch
from megarl.kernels.constants import LIMB_BITS
from megarl.kernels.contributions import binned_contributions
from megarl.kernels.tokens import Tokens


def grid(start: float, end: float, step: float, device: torch.device, cut: bool) -> torch.Tensor:
    """start, start + step, ... up to end, float64. cut: a shorter last step reaches end exactly. The number of steps is
    computed beforehand, since rounding errors of repeated addition could lose the last one."""
    steps = (end - start) / step
    count = math.ceil(steps - 1e-9) if cut else math.floor(steps + 1e-9)
    points = start + step * torch.arange(count + 1, dtype=torch.float64, device=device)
    return points.clamp(max=end) if cut else points


def path(first: int, second: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Grid indices [first + second - 1] of both bounds in the states visited: the first bound moves through its
    ``first`` points to the end, then the second through its ``second`` points."""
    step = torch.arange(first + second - 1, device=device)
    return step.clamp(max=first - 1), (step - first + 1).clamp(min=0)


POINTS = 256  # points that one level of the search in `first_high` evaluates
BEYOND = 2.0**29  # larger than every ratio, so that it clips nothing, but finite, for a metric


def first_high(
    batch: TokenBatch,
    low: torch.Tensor,  # 0-d float64
    start: float,
    step: float,
    enough: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    weighted: bool,
    group: ProcessGroup | None,
    backend: str = "torch",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The first c_high of the endless sequence start, start + step, ... at which `enough` holds, BEYOND if there is
    none; and the positive and negative contributions there. All 0-d float64.

    enough maps positive contributions [POINTS] and the negative one, 0-d, to [POINTS] bool; it must stay true for all
    larger c_high. The search narrows the place level by level: each level evaluates POINTS points in the gap that the
    level before it found, in one pass and one all-reduce. The number of levels suffices to reach BEYOND.
    """
    levels = math.ceil(math.log((BEYOND - start) / step + 1, POINTS))
    first = torch.zeros((), dtype=torch.int64, device=low.device)
    places = torch.arange(1, POINTS + 1, device=low.device)
    found = torch.ones((), dtype=torch.bool, device=low.device)
    for level in reversed(range(levels)):
        stride = POINTS**level
        highs = (start + step * (first + stride * places - 1).double()).clamp(max=BEYOND)  # the ends of the gaps
        positive, negative = contributions(batch, low[None], highs, weighted, group, backend)
        short = (~enough(positive, negative[0])).long().cumprod(0).sum()
        found = found & (short < POINTS)
        first = first + stride * short.clamp(max=POINTS - 1)
    at = short.clamp(max=POINTS - 1)  # index in the last level, whose points are one step apart
    return torch.where(found, highs.take(at), BEYOND), positive.take(at), negative[0]


def contributions(
    batch: TokenBatch,
    low: torch.Tensor,  # [L] float64, ascending
    high: torch.Tensor,  # [H] float64, ascending
    weighted: bool,  # w = pi_rollout, else 1
    group: ProcessGroup | None,
    backend: str = "torch",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over the tokens of all ranks, float64: of w A min(rho, c_high) over A > 0 for every c_high in ``high`` [H],
    and of w |A| max(rho, c_low) over A < 0 for every c_low in ``low`` [L]. One all-reduce of 6 (H + L + 4) int64."""
    highs = high.numel()
    table = binned_contributions(Tokens.of(batch), low, high, weighted, backend)
    if group is not None:
        dist.all_reduce(table, group=group)
    m, mr = (sum(part[i].double() * 2.0 ** (-i * LIMB_BITS) for i in range(3)) for part in table.split(3))
    m_high, mr_high = m[: highs + 1], mr[: highs + 1]
    m_low, mr_low = m[highs + 2 : -1], mr[highs + 2 : -1]
    above = m_high.sum() - m_high.cumsum(0)[:-1]
    at_high = mr_high.cumsum(0)[:-1] + high * above
    at_low = low * m_low.cumsum(0)[:-1] + (mr_low.sum() - mr_low.cumsum(0)[:-1])
    return at_high, at_low
