from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import Outcome, Sequence, Token, exp, rule
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import hard_clip
from megarl.objectives.parts.fields import choice, number
from megarl.objectives.parts.quantities import mean_log_ratio


@rule(mean_log_ratio)
def clip_sequence_mean(t: Token, s: Sequence, low: Any, high: Any) -> Outcome:
    return hard_clip(exp(s.value), t, low, high, t.clamped)


@dataclass(frozen=True)
class Gspo(Objective):
    """GSPO (arXiv:2507.18071, Eq. 5-7, in the token form of Eq. 13-14).

    objective_i = min(s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i), s_i = exp(mean_t log rho_t), averaged over
    responses. Token form: s_t = sg(s_i) exp(l_t - sg(l_t)), whose mean over the tokens of a response has the value and
    the gradient s_i A_i mean_t grad log pi(t) of objective_i, without a collective in the backward pass. A response
    whose s_i is past the bound in the direction of its advantage has no gradient. eps: 2e-3, as the MinPRO paper uses.
    """

    eps_low: float = number(2e-3, 0, 1)
    eps_high: float = number(2e-3, 0)
    aggregation: str = choice("sequence_mean", "token_mean")

    def rule(self, statistics: Any) -> Rule:
        return Rule(clip_sequence_mean, (1 - self.eps_low, 1 + self.eps_high), first="clip_fraction")
