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
from megarl.objectives.parts.clip_bounds import contributions, first_high, grid, path
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

    def statistics(
        self, batch: TokenBatch, group: ProcessGroup | None = None, backend: str = "torch"
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The bounds c_low and c_high at which the search over the tokens of all ranks of `group` stops, and the share
        of the positive contribution there, 0 for an empty batch; 0-d float64. One all-reduce, and with an infinite
        high_end those of `first_high`."""
        released, endless, device = self.variant == "released", self.high_end == math.inf, batch.loss_mask.device
        lows = grid(self.low_start, self.low_end, self.low_step, device, cut=released)
        highs = grid(self.high_start, self.high_start if endless else self.high_end, self.high_step, device, released)
        if released:
            low, high = path(lows.numel(), highs.numel(), device)
        else:
            # the loop asks whether c_low could still rise before it moves either bound
            high, low = path(highs.numel() if lows.numel() > 1 else 1, lows.numel(), device)
        positive, negative = contributions(batch, lows, highs, not released, group, backend)
        positive, negative = positive[high], negative[low]  # [states]
        stop = (~self._enough(positive, negative)).long().cumprod(0).sum().clamp(max=low.numel() - 1)
        c_low, c_high, positive, negative = (x.take(stop) for x in (lows[low], highs[high], positive, negative))
        if endless and (released or lows.numel() > 1):
            c_low = c_low if released else lows[0]  # which the released loop raises first, and the paper's never
            c_high, positive, negative = first_high(
                batch, c_low, self.high_start, self.high_step, self._enough, not released, group, backend
            )
        whole = positive + negative
        return c_low, c_high, positive / torch.where(whole > 0, whole, 1)

    def _enough(self, positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
        """Bool: whether the positive contribution reaches its target. Arguments: float64, of shapes that broadcast."""
        whole = negative + 1e-8 if self.variant == "released" else positive + negative
        return (positive >= self.positive_target * whole) | (negative <= 0)

    def rule(self, statistics: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> Rule:
        low, high, share = statistics
        scalars = {"bapo/ratio_min": low, "bapo/ratio_max": high, "bapo/positive_contribution": share}
        if self.variant == "paper":
            return Rule(RULES["clip_token"], (low, high), first="clip_fraction", scalars=scalars)
        return Rule(clip_dual, (low, high, self.DUAL_CLIP), first="clip_fraction", scalars=scalars)
