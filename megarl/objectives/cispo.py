from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.batch import TokenBatch
from megarl.objectives.clipping import soft_clip
from megarl.objectives.fields import number
from megarl.objectives.ratios import log_ratio
from megarl.objectives.terms import Objective, Terms, fraction_metrics, make_terms


@dataclass(frozen=True)
class Cispo(Objective):
    """CISPO (MiniMax-M1, arXiv:2506.13585, Eq. 4-5; constants of the MinPRO paper).

    objective_t = sg(clip(rho_t, 1 - eps_low, 1 + eps_high)) A_t log pi(t), averaged over tokens. Every token keeps its
    gradient, with a bounded weight; ``clip_fraction`` counts the weights that are bounded.
    """

    ratio_form: ClassVar[bool] = False

    eps_low: float = number(1.0, 0, 1)
    eps_high: float = number(4.0, 0)

    def __call__(self, batch: TokenBatch, statistics: Any = None) -> Terms:
        l, clamped = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        value, saturated = soft_clip(l.exp(), batch, 1 - self.eps_low, 1 + self.eps_high)
        metrics = fraction_metrics("clip_fraction", saturated, batch)
        return make_terms(self, batch, -value, batch.loss_mask, l, clamped, metrics)
