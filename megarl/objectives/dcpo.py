from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.kernels.constants import SEQUENCE_LOG_RATIO_LIMIT
from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import Outcome, Sequence, Token, clamp, exp, rule, sqrt
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import dual_clip, hard_clip
from megarl.objectives.parts.fields import choice, number


@rule()
def clip_prior(t: Token, s: Sequence, eps_low: Any, eps_high: Any, ratio_max: Any) -> Outcome:
    """The bounds solve |(r - 1) r q| = eps for the ratio r, q the token's probability under the behaviour policy."""
    inverse = exp(clamp(-t.rollout_logprob, 0.0, SEQUENCE_LOG_RATIO_LIMIT))  # 1 / q
    low = 0.5 + 0.5 * sqrt(clamp(1.0 - 4.0 * eps_low * inverse, 0.0, 1.0))
    high = clamp(0.5 + 0.5 * sqrt(1.0 + 4.0 * eps_high * inverse), 1.0, ratio_max)
    return dual_clip(hard_clip(t.ratio, t, low, high, t.clamped), t, ratio_max)


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

    def rule(self, statistics: Any) -> Rule:
        return Rule(clip_prior, (self.eps_low, self.eps_high, self.ratio_max), first="clip_fraction")
