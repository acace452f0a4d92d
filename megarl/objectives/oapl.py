from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import Outcome, Sequence, Token, rule
from megarl.objectives.objective import Objective
from megarl.objectives.parts.fields import number
from megarl.objectives.parts.quantities import sum_log_ratio


@rule(sum_log_ratio)
def advantage_regression(t: Token, s: Sequence, beta: Any) -> Outcome:
    weight = t.advantage - beta * s.value
    return Outcome(weight * t.logprob, weight, ~t.never, t.never, t.never)


@dataclass(frozen=True)
class Oapl(Objective):
    """OAPL, optimal-advantage policy optimization with a lagged inference policy (arXiv:2602.19362, Eq. 3).

    objective_t = sg(A_i - beta log rho_seq) log pi(t), log rho_seq = sum_t log rho_t over the response, whose gradient,
    summed over the response, is that of -(beta log rho_seq - A_i)^2 / (2 beta): a regression without clip or importance
    weight. Every token keeps its gradient. A_i is the paper's r_i - V, with ``objective.advantage = "optimal"``. The
    paper sums the squares over responses; token_mean differs from that by a constant factor. beta: the paper's text
    could not be had; its authors' A*-PO (arXiv:2505.20686) has 1e-3.
    """

    ratio_form: ClassVar[bool] = False

    beta: float = number(1e-3, 0, 100)

    def rule(self, statistics: Any) -> Rule:
        return Rule(advantage_regression, (self.beta,))
