from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.batch import TokenBatch
from megarl.kernels.token_pass import Rule
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import preserving_clip
from megarl.objectives.parts.fields import number
from megarl.objectives.parts.fused import constants
from megarl.objectives.parts.metrics import fraction_metrics
from megarl.objectives.parts.ratios import log_ratio
from megarl.objectives.parts.terms import Terms, make_terms


@dataclass(frozen=True)
class Gppo(Objective):
    """GPPO (Klear-Reasoner, arXiv:2508.07629, section "GPPO", with its beta_1 = beta_2 = 1).

    objective_t = min(rho_t A_t, clip(rho_t, b_low rho_t / sg(rho_t), b_high rho_t / sg(rho_t)) A_t), b_low = 1 -
    eps_low, b_high = 1 + eps_high: the value of `Dapo`. Gradient: where it is clipped b A_t grad log pi(t) with the
    bound b, instead of none; elsewhere rho_t A_t grad log pi(t). ``clip_fraction`` counts the bounded tokens. The
    authors' code adds a dual clip at 3: ``[objective.dual_clip] clip_ratio_c = 3.0``.
    """

    eps_low: float = number(0.2, 0, 1)
    eps_high: float = number(0.28, 0)

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        l, clamped = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        value, bounded = preserving_clip(l.exp(), batch.advantages, 1 - self.eps_low, 1 + self.eps_high)
        metrics = fraction_metrics("clip_fraction", bounded, batch)
        return make_terms(self, batch, -value, ~clamped, l, clamped, metrics)

    def rule(self, batch: TokenBatch, statistics: Any) -> Rule:
        bounds = constants((1 - self.eps_low, 1 + self.eps_high), batch.loss_mask.device)
        return Rule("clip_preserving", bounds, first="clip_fraction")
