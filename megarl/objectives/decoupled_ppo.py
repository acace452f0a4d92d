from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.kernels.constants import LOG_RATIO_LIMIT
from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import Outcome, Sequence, Token, absolute, clamp, exp, rule, where
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import hard_clip
from megarl.objectives.parts.fields import number, whole


@rule()
def decoupled(t: Token, s: Sequence, low: Any, high: Any, weight_max: Any) -> Outcome:
    proximal = t.logprob - t.old_logprob
    far = absolute(proximal) > LOG_RATIO_LIMIT
    ratio = exp(clamp(proximal, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    behaviour = exp(clamp(t.old_logprob - t.rollout_logprob, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    weight = where(behaviour > weight_max, weight_max, behaviour)
    o = hard_clip(ratio, t, low, high, far)
    return Outcome(o.value * weight, o.coefficient * weight, o.kept, o.first, o.second)


@dataclass(frozen=True)
class DecoupledPpo(Objective):
    """Decoupled PPO (arXiv:2110.00641; with stale rollouts AReaL, arXiv:2505.24298, section 5.2).

    objective_t = sg(w_t) min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t); r_t = pi(t) / pi_old(t) to the
    proximal policy, which `old_logprobs` holds, w_t = pi_old(t) / pi_rollout(t) to the behaviour policy, at most
    behaviour_weight_max. Gradient: w_t r_t A_t grad log pi(t) where not clipped.

    The proximal policy is the one before a step of `proximal_updates` updates: before the first of them, the batches of
    all get its log-probs. A step is 4 updates in M2PO's experiments (section 3.2) and in AReaL, which calls them
    mini-batches. With 1 it is the policy before each update, so that nothing is ever clipped.
    """

    requires: ClassVar[tuple[str, ...]] = ("old_logprobs",)

    proximal_updates: int = whole(4, 1)
    eps_low: float = number(0.2, 0, 1)
    eps_high: float = number(0.2, 0)
    behaviour_weight_max: float = number(math.inf, 0)

    @property
    def updates_per_proximal_policy(self) -> int:
        return self.proximal_updates

    def rule(self, statistics: Any) -> Rule:
        bounds = (1 - self.eps_low, 1 + self.eps_high, self.behaviour_weight_max)
        return Rule(decoupled, bounds, first="clip_fraction")
