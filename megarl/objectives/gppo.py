from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import Outcome, Sequence, Token, rule, where
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import hard_clip
from megarl.objectives.parts.fields import number


@rule()
def clip_preserving(t: Token, s: Sequence, low: Any, high: Any) -> Outcome:
    """The value of the hard clip, but with a gradient also where it is bounded."""
    o = hard_clip(t.ratio, t, low, high, t.clamped)
    return Outcome(o.value, where(t.clamped, 0.0, o.value), ~t.clamped, o.first, t.never)


@dataclass(frozen=True)
class Gppo(Objective):
    """GPPO (Klear-Reasoner, arXiv:2508.07629, section "GPPO", with its beta_1 = beta_2 = 1).

    objective_t = min(rho_t A_t, clip(rho_t, b_low rho_t / sg(rho_t), b_high rho_t / sg(rho_t)) A_t), b_low = 1 -
    eps_low, b_high = 1 + eps_high: the value of `Dapo`. Gradient: where it is clipped b A_t grad log pi(t) with the
    bound b, instead of none; elsewhere rho_t A_t grad log pi(t). ``clip_fraction`` counts the bounded tokens. The
    authors' code adds a dual clip at 3: ``[objective.dual_clip] clip_ratio_c = 3.0``.
    """

    eps_low: float = number(0.2, 0, 1)
    eps_high: float = number(0.28, 0)

    def rule(self, statistics: Any) -> Rule:
        return Rule(clip_preserving, (1 - self.eps_low, 1 + self.eps_high), first="clip_fraction")
