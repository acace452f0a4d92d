from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.kernels.constants import SEQUENCE_LOG_RATIO_LIMIT
from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import Outcome, Sequence, Token, absolute, clamp, exp, rule, where
from megarl.objectives.objective import Objective
from megarl.objectives.parts.fields import number


@rule()
def regularised_divergence(t: Token, s: Sequence, threshold: Any) -> Outcome:
    q = exp(clamp(t.rollout_logprob, -SEQUENCE_LOG_RATIO_LIMIT, 0.0))
    shift = q * (t.ratio - 1.0)  # p - q
    weight = absolute(t.advantage) / threshold
    value = t.ratio * t.advantage - 0.5 * weight * shift * (t.ratio - 1.0)
    slope = t.ratio * (t.advantage - weight * shift)
    return Outcome(value, where(t.clamped, 0.0, slope), ~t.clamped, t.never, t.never)


@dataclass(frozen=True)
class Drpo(Objective):
    """DRPO, divergence regularised policy optimization (arXiv:2606.09821; the authors' code in UniRL).

    objective_t = rho_t A_t - |A_t| q_t (rho_t - 1)^2 / (2 threshold), q_t the probability under the behaviour policy.
    Gradient: rho_t A_t (1 - sign(A_t (rho_t - 1)) |p_t - q_t| / threshold) grad log pi(t). So the gradient of a token
    that moves along its advantage fades as DPPO's divergence |p - q| grows, and turns back beyond the threshold, where
    DPPO masks. The default is the paper's 12.5, with which it only fades, by at most 8 %, since |p - q| <= 1.
    """

    threshold: float = number(12.5, 1e-6)

    def rule(self, statistics: Any) -> Rule:
        return Rule(regularised_divergence, (self.threshold,))
