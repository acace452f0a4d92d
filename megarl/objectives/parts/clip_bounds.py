"""BAPO's search for clip bounds: its loop visits states on one fixed path, so one binned pass evaluates them all.

For A > 0 a token contributes w A min(rho, c_high), for A < 0 it contributes w |A| max(rho, c_low): each is linear
between two grid points, so per-bin sums of w and w rho give the contribution at every state. Sums are exact integers.
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


def grid(start: float, end: float, step: float, device: torch.device, cut: bool = False) -> torch.Tensor:
    """start, start + step, ... up to end, float64; `cut`: a shorter last step reaches end. The number of steps is
    computed, since adding floats would lose the last one."""
    steps = (end - start) / step
    count = math.ceil(steps - 1e-9) if cut else math.floor(steps + 1e-9)
    points = start + step * torch.arange(count + 1, dtype=torch.float64, device=device)
    return points.clamp(max=end) if cut else points


def path(first: int, second: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Grid indices [first + second - 1] of both bounds in the states: one goes to its end, then the other."""
    step = torch.arange(first + second - 1, device=device)
    return step.clamp(max=first - 1), (step - first + 1).clamp(min=0)


POINTS = 256  # of a level of `first_high`
BEYOND = 2.0**29  # above every ratio: a bound that clips nothing, and still a finite number for a metric


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
    """The first of start, start + step, ... without end at which `enough` holds, BEYOND if there is none; and the
    positive and negative contributions there. All 0-d float64.

    enough maps the contributions [POINTS] and 0-d to [POINTS] bool, and stays true once it is. Each level looks at
    POINTS places of the last one's gap, in one pass and one all-reduce; there are as many as reach BEYOND.
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
    at = short.clamp(max=POINTS - 1)  # of the last level, whose gaps are single steps
    return torch.where(found, highs.take(at), BEYOND), positive.take(at), negative[0]


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
