from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import Outcome, Sequence, Token, rule
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import soft_clip
from megarl.objectives.parts.fields import number


@rule()
def soft_clip_token(t: Token, s: Sequence, low: Any, high: Any) -> Outcome:
    return soft_clip(t.ratio, t, low, high)


@dataclass(frozen=True)
class Cispo(Objective):
    """CISPO (MiniMax-M1, arXiv:2506.13585, Eq. 4-5; constants of the MinPRO paper).

    objective_t = sg(clip(rho_t, 1 - eps_low, 1 + eps_high)) A_t log pi(t), averaged over tokens. Every token keeps its
    gradient, with a bounded weight; ``clip_fraction`` counts the weights that are bounded.
    """

    ratio_form: ClassVar[bool] = False

    eps_low: float = number(1.0, 0, 1)
    eps_high: float = number(4.0, 0)

    def rule(self, statistics: Any) -> Rule:
        return Rule(soft_clip_token, (1 - self.eps_low, 1 + self.eps_high), first="clip_fraction")
