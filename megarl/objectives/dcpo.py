from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.batch import TokenBatch
from megarl.kernels.token_pass import Rule
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import dual_clip, hard_clip, prior_bounds
from megarl.objectives.parts.fields import choice, number
from megarl.objectives.parts.fused import constants
from megarl.objectives.parts.metrics import fraction_metrics
from megarl.objectives.parts.ratios import log_ratio
from megarl.objectives.parts.terms import Terms, make_terms


@dataclass(frozen=True)
class Dcpo(Objective):
    """DCPO's dynamic-adaptive clipping (arXiv:2509.02333, section "Dynamic-Adaptive Clipping").

    objective_t = min(rho_t A_t, clip(rho_t, low_t, high_t) A_t), with the bounds that |(rho - 1) pi(t)| <= eps gives
    for the token's probability q under the behaviour policy: low_t = 1/2 + 1/2 sqrt(max(1 - 4 eps_low / q, 0)), high_t
    = 1/2 + 1/2 sqrt(1 + 4 eps_high / q), at most ratio_max. For A < 0 the objective is at least ratio_max A_t (dual
    clip); this and ratio_max = 10 are from the authors' code. Gradient as `Grpo`. The paper's "only token mean" sums
    the responses' means; here they are averaged, which differs by a constant factor.

    Not included: smooth advantage standardisation, which mixes in the rewards that a prompt had in earlier steps. In a
    prompt's first step, i = 1, it equals standardisation within the group (``objective.advantage``).
    """

    eps_low: float = number(0.16, 0)
    eps_high: float = number(0.2, 0)
    ratio_max: float = number(10.0, 1)
    aggregation: str = choice("sequence_mean", "token_mean")

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        l, clamped = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        low, high = prior_bounds(batch, self.eps_low, self.eps_high, self.ratio_max)
        value, clipped = hard_clip(l.exp(), batch.advantages, low, high)
        value, capped = dual_clip(value, batch.advantages, self.ratio_max)
        clipped = clipped | capped
        metrics = fraction_metrics("clip_fraction", clipped, batch)
        return make_terms(self, batch, -value, ~clipped & ~clamped, l, clamped, metrics)

    def rule(self, batch: TokenBatch, statistics: Any) -> Rule:
        parameters = constants((self.eps_low, self.eps_high, self.ratio_max), batch.loss_mask.device)
        return Rule("clip_prior", parameters, first="clip_fraction")
