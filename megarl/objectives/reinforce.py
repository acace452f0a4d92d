from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import Outcome, Sequence, Token, rule, where
from megarl.objectives.objective import Objective


@rule()
def reinforce(t: Token, s: Sequence) -> Outcome:
    value = t.ratio * t.advantage
    return Outcome(value, where(t.clamped, 0.0, value), ~t.clamped, t.never, t.never)


@dataclass(frozen=True)
class Reinforce(Objective):
    """Importance-weighted policy gradient without a trust region (the papers' "no TR").

    objective_t = rho_t A_t, rho_t = pi(t) / pi_rollout(t); the loss is its negative. Gradient: rho_t A_t grad log pi(t)
    for every trained token whose log-ratio is not clamped.
    """

    def rule(self, statistics: Any) -> Rule:
        return Rule(reinforce)
