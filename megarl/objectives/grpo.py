from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.batch import TokenBatch
from megarl.kernels.token_pass import Rule
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import hard_clip
from megarl.objectives.parts.fields import choice, number
from megarl.objectives.parts.fused import constants
from megarl.objectives.parts.metrics import fraction_metrics
from megarl.objectives.parts.ratios import log_ratio
from megarl.objectives.parts.terms import Terms, make_terms


@dataclass(frozen=True)
class Grpo(Objective):
    """GRPO (DeepSeekMath, arXiv:2402.03300, Eq. 3, without its KL term).

    objective_t = min(rho_t A_t, clip(rho_t, 1 - eps_low, 1 + eps_high) A_t), rho_t = pi(t) / pi_rollout(t), averaged
    within a response and then over responses. Gradient: rho_t A_t grad log pi(t), except for tokens that already moved
    past the bound in the direction of their advantage.
    """

    eps_low: float = number(0.2, 0, 1)
    eps_high: float = number(0.2, 0)
    aggregation: str = choice("sequence_mean", "token_mean")

    @property
    def dampened_below(self) -> float:
        return self.dampen_threshold or 1 - self.eps_low

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        l, clamped = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        value, clipped = hard_clip(l.exp(), batch.advantages, 1 - self.eps_low, 1 + self.eps_high)
        metrics = fraction_metrics("clip_fraction", clipped, batch)
        return make_terms(self, batch, -value, ~clipped & ~clamped, l, clamped, metrics)

    def rule(self, batch: TokenBatch, statistics: Any) -> Rule:
        bounds = constants((1 - self.eps_low, 1 + self.eps_high), batch.loss_mask.device)
        return Rule("clip_token", bounds, first="clip_fraction")
