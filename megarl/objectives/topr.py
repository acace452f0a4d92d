from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.kernels.constants import SEQUENCE_LOG_RATIO_LIMIT
from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import Outcome, Sequence, Token, clamp, exp, rule, where
from megarl.objectives.objective import Objective
from megarl.objectives.parts.fields import number
from megarl.objectives.parts.quantities import sum_log_ratio


@rule(sum_log_ratio)
def tapered_sequence(t: Token, s: Sequence, low: Any, high: Any) -> Outcome:
    ratio = exp(clamp(s.value, -SEQUENCE_LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMIT))
    negative = t.advantage < 0.0
    weight = where(t.advantage > 0.0, 1.0, clamp(ratio, low, high)) * t.advantage
    return Outcome(weight * t.logprob, weight, ~t.never, negative & ((ratio < low) | (ratio > high)), t.never)


@dataclass(frozen=True)
class Topr(Objective):
    """TOPR, tapered off-policy REINFORCE (arXiv:2503.14286).

    objective_t = w_i A_t log pi(t); w_i = 1 for A > 0 (a supervised step on good responses, however old), w_i =
    sg(clip(rho_seq, ratio_min, ratio_max)) for A < 0, rho_seq = prod_t rho_t over the response. Every token keeps its
    gradient, through log pi alone. The paper sums over the tokens of a response and averages over responses; token_mean
    differs from that by a constant factor (responses / tokens).
    """

    ratio_form: ClassVar[bool] = False

    ratio_min: float = number(0.0, 0, 1)
    ratio_max: float = number(1.0, 0)

    def rule(self, statistics: Any) -> Rule:
        return Rule(tapered_sequence, (self.ratio_min, self.ratio_max), first="clip_fraction")
