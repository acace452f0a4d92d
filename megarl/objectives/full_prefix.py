from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.batch import TokenBatch
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import soft_clip
from megarl.objectives.parts.fields import number
from megarl.objectives.parts.metrics import fraction_metrics
from megarl.objectives.parts.prefix_ratio import prefix_log_ratio
from megarl.objectives.parts.ratios import log_ratio
from megarl.objectives.parts.terms import Terms, make_terms


@dataclass(frozen=True)
class FullPrefix(Objective):
    """CISPO with the full prefix ratio (MinPRO paper, section 6.2, "Direct Use of the Prefix Ratio"; Theorem 1).

    objective_t = sg(clip(rho_{1:t}, 1 - eps_low, 1 + eps_high)) A_t log pi(t), rho_{1:t} = prod_{i<=t} rho_i over the
    trained tokens of the response, averaged over tokens. The exact correction of the policy gradient, whose variance
    and length bias `MinPro` avoids. Every token keeps its gradient, through log pi alone.
    """

    ratio_form: ClassVar[bool] = False

    eps_low: float = number(1.0, 0, 1)
    eps_high: float = number(4.0, 0)

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        l, clamped = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        ratio = prefix_log_ratio(l, batch).exp()
        value, saturated = soft_clip(ratio, batch, 1 - self.eps_low, 1 + self.eps_high)
        metrics = fraction_metrics("clip_fraction", saturated, batch)
        return make_terms(self, batch, -value, batch.loss_mask, l, clamped, metrics)
