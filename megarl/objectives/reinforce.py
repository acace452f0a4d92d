from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.batch import TokenBatch
from megarl.kernels.token_pass import Rule
from megarl.objectives.objective import Objective
from megarl.objectives.parts.fused import constants
from megarl.objectives.parts.ratios import log_ratio
from megarl.objectives.parts.terms import Terms, make_terms


@dataclass(frozen=True)
class Reinforce(Objective):
    """Importance-weighted policy gradient without a trust region (the papers' "no TR").

    objective_t = rho_t A_t, rho_t = pi(t) / pi_rollout(t); the loss is its negative. Gradient: rho_t A_t grad log pi(t)
    for every trained token whose log-ratio is not clamped.
    """

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        l, clamped = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        return make_terms(self, batch, -l.exp() * batch.advantages.detach(), ~clamped, l, clamped, {})

    def rule(self, batch: TokenBatch, statistics: Any) -> Rule:
        return Rule("reinforce", constants((), batch.loss_mask.device))
