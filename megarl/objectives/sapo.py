from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.kernels.constants import SEQUENCE_LOG_RATIO_LIMIT
from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import Outcome, Sequence, Token, clamp, exp, rule, where
from megarl.objectives.objective import Objective
from megarl.objectives.parts.fields import choice, number


@rule()
def gated(t: Token, s: Sequence, positive: Any, negative: Any) -> Outcome:
    tau = where(t.advantage > 0.0, positive, negative)
    e = exp(clamp(-tau * (t.ratio - 1.0), -SEQUENCE_LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMIT))
    p = 1.0 / (1.0 + e)
    # e p is 1 - p without a subtraction: for large ratios it is all that remains of the gradient
    coefficient = where(t.clamped, 0.0, 4.0 * p * p * e * t.ratio * t.advantage)
    return Outcome(4.0 / tau * p * t.advantage, coefficient, ~t.clamped, t.never, t.never)


@dataclass(frozen=True)
class Sapo(Objective):
    """SAPO, soft adaptive policy optimization (arXiv:2511.20347, Eq. 5-6).

    objective_t = 4 / tau sigmoid(tau (rho_t - 1)) A_t, tau = tau_positive for A > 0, else tau_negative: a gate in place
    of the clip. Its gradient is 4 p (1 - p) rho_t A_t grad log pi(t), p the sigmoid: that of `Reinforce` at rho = 1,
    which falls smoothly on both sides, faster for negative advantages. At rho = 1 the value is 2 / tau A_t, not A_t.
    """

    ratio_form: ClassVar[bool] = False

    tau_positive: float = number(1.0, 1e-3, 50)
    tau_negative: float = number(1.05, 1e-3, 50)
    aggregation: str = choice("sequence_mean", "token_mean")

    def rule(self, statistics: Any) -> Rule:
        return Rule(gated, (self.tau_positive, self.tau_negative))
