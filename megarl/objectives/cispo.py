from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.batch import TokenBatch
from megarl.kernels.token_pass import Rule
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import soft_clip
from megarl.objectives.parts.fields import number
from megarl.objectives.parts.fused import constants
from megarl.objectives.parts.metrics import fraction_metrics
from megarl.objectives.parts.ratios import log_ratio
from megarl.objectives.parts.terms import Terms, make_terms


@dataclass(frozen=True)
class Cispo(Objective):
    """CISPO (MiniMax-M1, arXiv:2506.13585, Eq. 4-5; constants of the MinPRO paper).

    objective_t = sg(clip(rho_t, 1 - eps_low, 1 + eps_high)) A_t log pi(t), averaged over tokens. Every token keeps its
    gradient, with a bounded weight; ``clip_fraction`` counts the weights that are bounded.
    """

    ratio_form: ClassVar[bool] = False

    eps_low: float = number(1.0, 0, 1)
    eps_high: float = number(4.0, 0)

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        l, clamped = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        value, saturated = soft_clip(l.exp(), batch, 1 - self.eps_low, 1 + self.eps_high)
        metrics = fraction_metrics("clip_fraction", saturated, batch)
        return make_terms(self, batch, -value, batch.loss_mask, l, clamped, metrics)

    def rule(self, batch: TokenBatch, statistics: Any) -> Rule:
        bounds = constants((1 - self.eps_low, 1 + self.eps_high), batch.loss_mask.device)
        return Rule("soft_clip_token", bounds, first="clip_fraction")
