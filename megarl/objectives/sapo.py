from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from megarl.batch import TokenBatch
from megarl.kernels.token_pass import Rule
from megarl.objectives.objective import Objective
from megarl.objectives.parts.fields import choice, number
from megarl.objectives.parts.fused import constants
from megarl.objectives.parts.ratios import log_ratio
from megarl.objectives.parts.terms import Terms, make_terms


@dataclass(frozen=True)
class Sapo(Objective):
    """SAPO, soft adaptive policy optimization (arXiv:2511.20347, Eq. 5-6).

    objective_t = 4 / tau sigmoid(tau (rho_t - 1)) A_t, tau = tau_positive for A > 0, else tau_negative: a gate in place
    of the clip. Its gradient is 4 p (1 - p) rho_t A_t grad log pi(t), p the sigmoid: that of `Reinforce` at rho = 1,
    which falls smoothly on both sides, faster for negative advantages. At rho = 1 the value is 2 / tau A_t, not A_t.
    """

    ratio_form: ClassVar[bool] = False

    tau_positive: float = number(1.0, 1e-3, 50)
    tau_negative: float = number(1.05, 1e-3, 50)
    aggregation: str = choice("sequence_mean", "token_mean")

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        l, clamped = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        advantages = batch.advantages.detach()
        tau = torch.where(advantages > 0, self.tau_positive, self.tau_negative)
        # written so that autograd never computes 1 - p by subtraction: for large ratios it is all that remains of the
        # gradient
        gate = 4 / tau / (1 + (-tau * (l.exp() - 1)).exp())
        return make_terms(self, batch, -gate * advantages, ~clamped, l, clamped, {})

    def rule(self, batch: TokenBatch, statistics: Any) -> Rule:
        return Rule("gated", constants((self.tau_positive, self.tau_negative), batch.loss_mask.device))
