from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.kernels.constants import LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMIT
from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import Outcome, Sequence, Token, clamp, exp, rule, where
from megarl.objectives.objective import Objective
from megarl.objectives.parts.fields import number
from megarl.objectives.parts.quantities import sum_log_ratio


@rule(sum_log_ratio)
def gamma_sequence(
    t: Token, s: Sequence, k_positive: Any, lambda_positive: Any, k_negative: Any, lambda_negative: Any
) -> Outcome:
    negative = t.advantage < 0.0
    w = clamp(s.value, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k = where(negative, k_negative, k_positive)
    log_weight = k * w - where(negative, lambda_negative, lambda_positive) * (exp(w) - 1.0)
    weight = exp(clamp(log_weight, -SEQUENCE_LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMIT)) * t.advantage
    return Outcome(weight * t.logprob, weight, ~t.never, t.never, t.never)


@dataclass(frozen=True)
class Vespo(Objective):
    """VESPO, variational sequence-level soft policy optimization (arXiv:2602.10693; the authors' code).

    objective_t = sg(phi(w_i)) A_t log pi(t), phi(w) = w^k exp(lambda (1 - w)), w_i = prod_t rho_t over the response,
    clamped to [e^-20, e^20]. phi(1) = 1; phi is largest at w = k / lambda and falls to 0 on both sides. (k, lambda)
    depend on the advantage's sign. Every token keeps its gradient, through log pi alone.
    """

    ratio_form: ClassVar[bool] = False

    k_positive: float = number(2.0, 0, 100)
    lambda_positive: float = number(3.0, 0, 100)
    k_negative: float = number(3.0, 0, 100)
    lambda_negative: float = number(2.0, 0, 100)

    def rule(self, statistics: Any) -> Rule:
        shape = (self.k_positive, self.lambda_positive, self.k_negative, self.lambda_negative)
        return Rule(gamma_sequence, shape)
