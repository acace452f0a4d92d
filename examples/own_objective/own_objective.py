"""The objective OwnObjective. In a recipe: [objective] path = "own_objective.py:OwnObjective"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import Outcome, Sequence, Token, clamp, rule, where
from megarl.objectives import Objective
from megarl.objectives.parts.fields import number


@rule()
def own_objective(t: Token, s: Sequence, highest: Any) -> Outcome:
    """Value, its derivative with respect to the token's log-prob, whether the gradient survives, two flags."""
    weight = clamp(t.ratio, 0.0, highest)  # rho_t = pi(t) / pi_rollout(t); t.prefix_ratio is m_t rho_t
    value = weight * t.advantage * t.logprob
    return Outcome(value, where(t.clamped, 0.0, weight * t.advantage), ~t.clamped, t.ratio > highest, t.never)


@dataclass(frozen=True)
class OwnObjective(Objective):
    """objective_t = sg(min(rho_t, ratio_max)) A_t log pi(t): every token keeps its gradient, with a bounded weight.

    Change the rule and the settings. What no function of one token can compute, a method terms(self, batch,
    statistics) does instead of rule.
    """

    ratio_form: ClassVar[bool] = False  # the gradient flows through log pi, not through the ratio

    ratio_max: float = number(5.0, 1)  # the default and the least value; [objective] ratio_max = 3 sets it

    def rule(self, statistics: Any) -> Rule:
        return Rule(own_objective, (self.ratio_max,), first="clip_fraction")
