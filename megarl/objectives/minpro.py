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
from megarl.objectives.parts.prefix_min import prefix_min_log_ratio
from megarl.objectives.parts.ratios import log_ratio
from megarl.objectives.parts.terms import Terms, make_terms


@dataclass(frozen=True)
class MinPro(Objective):
    """MinPRO ("A Step Back: Prefix Importance Ratio Stabilizes Policy Optimization", section 4).

    objective_t = sg(clip(m_t rho_t, 1 - eps_low, 1 + eps_high)) A_t log pi(t), averaged over tokens; m_t = min_{i<t}
    rho_i over the earlier trained tokens of the response, 1 for the first. Every token keeps its gradient, through
    log pi alone; tokens after an unlikely prefix have a small weight.
    """

    ratio_form: ClassVar[bool] = False

    eps_low: float = number(1.0, 0, 1)
    eps_high: float = number(4.0, 0)

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        l, clamped = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        prefix = prefix_min_log_ratio(l, batch)
        ratio = (prefix + l).exp()
        value, saturated = soft_clip(ratio, batch, 1 - self.eps_low, 1 + self.eps_high)
        metrics = fraction_metrics("clip_fraction", saturated, batch)
        return make_terms(self, batch, -value, batch.loss_mask, l, clamped, metrics)

    def rule(self, batch: TokenBatch, statistics: Any) -> Rule:
        bounds = constants((1 - self.eps_low, 1 + self.eps_high), batch.loss_mask.device)
        return Rule("soft_clip_prefix", bounds, first="clip_fraction")
