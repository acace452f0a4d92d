from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.batch import TokenBatch
from megarl.objectives.clipping import soft_clip
from megarl.objectives.fields import number
from megarl.objectives.prefix import dampen_metrics
from megarl.objectives.ratios import log_ratio, prefix_min_log_ratio
from megarl.objectives.terms import Objective, Terms, fraction_metrics, make_terms


@dataclass(frozen=True)
class MinPro(Objective):
    """MinPRO ("A Step Back: Prefix Importance Ratio Stabilizes Policy Optimization", section 4).

    objective_t = sg(clip(m_t rho_t, 1 - eps_low, 1 + eps_high)) A_t log pi(t), averaged over tokens; m_t = min_{i<t}
    rho_i over the earlier trained tokens of the response, 1 for the first. Every token keeps its gradient, through
    log pi alone; what follows an unlikely prefix has a small weight.
    """

    ratio_form: ClassVar[bool] = False

    eps_low: float = number(1.0, 0, 1)
    eps_high: float = number(4.0, 0)

    def __call__(self, batch: TokenBatch, statistics: Any = None) -> Terms:
        l, clamped = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        prefix = prefix_min_log_ratio(l, batch)
        ratio = (prefix + l).exp()
        value, saturated = soft_clip(ratio, batch, 1 - self.eps_low, 1 + self.eps_high)
        metrics = fraction_metrics("clip_fraction", saturated, batch) | dampen_metrics(ratio, prefix, batch)
        return make_terms(self, batch, -value, batch.loss_mask, l, clamped, metrics)
