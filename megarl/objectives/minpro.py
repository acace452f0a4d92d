from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import Outcome, Sequence, Token, rule
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import soft_clip
from megarl.objectives.parts.fields import number


@rule()
def soft_clip_prefix(t: Token, s: Sequence, low: Any, high: Any) -> Outcome:
    return soft_clip(t.prefix_ratio, t, low, high)


@dataclass(frozen=True)
class MinPro(Objective):
    """MinPRO ("A Step Back: Prefix Importance Ratio Stabilizes Policy Optimization", section 4).

    objective_t = sg(clip(m_t rho_t, 1 - eps_low, 1 + eps_high)) A_t log pi(t), averaged over tokens; m_t = min_{i<t}
    rho_i over the earlier trained tokens of the response, 1 for the first. Every token keeps its gradient, through
    log pi alone; tokens after an unlikely prefix have a small weight.
    """

    ratio_form: ClassVar[bool] = False

    eps_low: float = number(1.0, 0, 1)
    eps_high: float = number(4.0, 0)

    def rule(self, statistics: Any) -> Rule:
        return Rule(soft_clip_prefix, (1 - self.eps_low, 1 + self.eps_high), first="clip_fraction")
