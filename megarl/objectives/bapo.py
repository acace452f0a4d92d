from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroup

from megarl.batch import TokenBatch
from megarl.errors import UserError
from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import RULES, Outcome, Sequence, Token, rule
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clip_bounds import RatioBounds, contributions, first_high, grid, path
from megarl.objectives.parts.clipping import dual_clip, hard_clip
from megarl.objectives.parts.fields import choice, number


@rule()
def clip_dual(t: Token, s: Sequence, low: Any, high: Any, bound: Any) -> Outcome:
    return dual_clip(hard_clip(t.ratio, t, low, high, t.clamped), t, bound)


@dataclass(frozen=True)
class Bapo(Objective):
    """BAPO (Algorithm 1 and Eq. 8).

    objective_t = min(rho_t A_t, clip(rho_t, c_low, c_high) A_t). Gradient as `Grpo`; none through the bounds. They
    start at (low_start, high_start); while the positive contribution is below positive_target and c_low + low_step <=
    low_end, c_high rises by high_step if that keeps it within high_end, else c_low by low_step. Positive contribution,
    over the whole batch: sum_{A>0} pi_rollout |min(rho A, clip(rho, 0, c_high) A)| divided by the sum over all A of
    pi_rollout |min(rho A, clip(rho, c_low, c_high) A)|. The paper sums the loss over tokens; token_mean differs by a
    constant factor. high_end = inf (Table 6): c_high rises until positive_target is reached or nothing is clipped
    above; since it can always rise, c_low stays at low_start.

    variant "released" is the authors' code: c_low rises first, then c_high; no pi_rollout weight; positive_target is
    compared with positive / negative (a share of .4 is a quotient of .667 there); dual clip at 3 in the loss. That code
    also searches per micro-batch (``statistics_scope = "micro"``).
    """

    needs_statistics: ClassVar[bool] = True
    DUAL_CLIP: ClassVar[float] = 3.0  # verl's default clip_ratio_c, which the released loss applies

    positive_target: float = number(0.4, 0)
    low_start: float = number(0.6, 0, 1)
    low_end: float = number(0.9, 0, 1)
    low_step: float = number(0.02, 1e-6)
    high_start: float = number(1.2, 1)
    high_end: float = number(3.0, 1)
    high_step: float = number(0.05, 1e-6)
    variant: str = choice("paper", "released")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant == "paper" and self.positive_target > 1:
            raise UserError(f"Bapo.positive_target is {self.positive_target}, but is a share; expected [0, 1]")
        for side in ("low", "high"):
            start, end = getattr(self, f"{side}_start"), getattr(self, f"{side}_end")
            if not start <= end:
                raise UserError(f"Bapo.{side}_end is {end}; expected at least {side}_start = {start}")

    def statistics(self, batch: TokenBatch, group: ProcessGroup | None = None, backend: str = "torch") -> RatioBounds:
        """The bounds at which the search over the tokens of all ranks of `group` stops; one all-reduce."""
        released, device = self.variant == "released", batch.loss_mask.device
        lows = grid(self.low_start, self.low_end, self.low_step, device, cut=released)
        if self.high_end == math.inf:
            return self._endless(batch, lows, group, backend)
        highs = grid(self.high_start, self.high_end, self.high_step, device, cut=released)
        if released:
            low, high = path(lows.numel(), highs.numel(), device)
        else:
            # the loop asks whether c_low could still rise before it moves either bound
            high, low = path(highs.numel() if lows.numel() > 1 else 1, lows.numel(), device)
        positive, negative = contributions(batch, lows, highs, not released, group, backend)
        positive, negative = positive[high], negative[low]  # [states]
        stop = (~self._enough(positive, negative)).long().cumprod(0).sum().clamp(max=low.numel() - 1)
        return RatioBounds(*(x.take(stop) for x in (lows[low], highs[high], positive, negative)))

    def _enough(self, positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        """Bool: whether the positive contribution reaches its target. Arguments: float64, of shapes that broadcast."""
        whole = negative + 1e-8 if self.variant == "released" else positive + negative
        return (positive >= self.positive_target * whole) | (negative <= 0)

    def _endless(self, batch: TokenBatch, lows: torch.Tensor, group: ProcessGroup | None, backend: str) -> RatioBounds:
        """`statistics` for high_end = inf."""
        weighted = self.variant == "paper"
        low = lows[0]
        if self.variant == "released":  # c_low goes first
            start = grid(self.high_start, self.high_start, self.high_step, lows.device)
            positive, negative = contributions(batch, lows, start, weighted, group, backend)
            stop = (~self._enough(positive, negative)).long().cumprod(0).sum()
            low = lows.take(stop.clamp(max=lows.numel() - 1))
        elif lows.numel() == 1:  # the paper's loop ends before it moves anything
            high = torch.full_like(low, self.high_start)
            positive, negative = contributions(batch, lows, high[None], weighted, group, backend)
            return RatioBounds(low, high, positive[0], negative[0])
        high, at_high, at_low = first_high(
            batch, low, self.high_start, self.high_step, self._enough, weighted, group, backend
        )
        return RatioBounds(low, high, at_high, at_low)

    def rule(self, statistics: RatioBounds) -> Rule:
        low, high, share = statistics.ratio_min, statistics.ratio_max, statistics.positive_share
        scalars = {"bapo/ratio_min": low, "bapo/ratio_max": high, "bapo/positive_contribution": share}
        if self.variant == "paper":
            return Rule(RULES["clip_token"], (low, high), first="clip_fraction", scalars=scalars)
        return Rule(clip_dual, (low, high, self.DUAL_CLIP), first="clip_fraction", scalars=scalars)
