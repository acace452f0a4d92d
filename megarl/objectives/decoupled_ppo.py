from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.batch import TokenBatch
from megarl.kernels.token_pass import Rule
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import hard_clip
from megarl.objectives.parts.fields import number, whole
from megarl.objectives.parts.fused import constants
from megarl.objectives.parts.metrics import fraction_metrics
from megarl.objectives.parts.ratios import log_ratio
from megarl.objectives.parts.terms import Terms, make_terms, require


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

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        mask, old = batch.loss_mask, require(batch, "old_logprobs", "decoupled_ppo").detach()
        l, clamped = log_ratio(batch.logprobs, batch.rollout_logprobs, mask)
        proximal, far = log_ratio(batch.logprobs, old, mask)
        behaviour, _ = log_ratio(old, batch.rollout_logprobs, mask)
        weight = behaviour.exp().clamp(max=self.behaviour_weight_max)
        value, clipped = hard_clip(proximal.exp(), batch.advantages, 1 - self.eps_low, 1 + self.eps_high)
        metrics = fraction_metrics("clip_fraction", clipped, batch)
        return make_terms(self, batch, -weight * value, ~clipped & ~far, l, clamped, metrics)

    def rule(self, batch: TokenBatch, statistics: Any) -> Rule:
        require(batch, "old_logprobs", "decoupled_ppo")
        bounds = (1 - self.eps_low, 1 + self.eps_high, self.behaviour_weight_max)
        return Rule("decoupled", constants(bounds, batch.loss_mask.device), first="clip_fraction")
