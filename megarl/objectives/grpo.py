from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import Outcome, Sequence, Token, rule
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import hard_clip
from megarl.objectives.parts.fields import choice, number


@rule()
def clip_token(t: Token, s: Sequence, low: Any, high: Any) -> Outcome:
    return hard_clip(t.ratio, t, low, high, t.clamped)


@dataclass(frozen=True)
class Grpo(Objective):
    """GRPO (DeepSeekMath, arXiv:2402.03300, Eq. 3, without its KL term).

    objective_t = min(rho_t A_t, clip(rho_t, 1 - eps_low, 1 + eps_high) A_t), rho_t = pi(t) / pi_rollout(t), averaged
    within a response and then over responses. Gradient: rho_t A_t grad log pi(t), except for tokens that already moved
    past the bound in the direction of their advantage.
    """

    eps_low: float = number(0.2, 0, 1)
    eps_high: float = number(0.2, 0)
    aggregation: str = choice("sequence_mean", "token_mean")

    @property
    def dampened_below(self) -> float:
        return self.dampen_threshold or 1 - self.eps_low

    def rule(self, statistics: Any) -> Rule:
        return Rule(clip_token, (1 - self.eps_low, 1 + self.eps_high), first="clip_fraction")
