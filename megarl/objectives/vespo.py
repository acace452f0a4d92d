from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from megarl.batch import TokenBatch
from megarl.kernels.constants import LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMIT
from megarl.kernels.token_pass import Rule
from megarl.objectives.objective import Objective
from megarl.objectives.parts.fields import number
from megarl.objectives.parts.fused import constants
from megarl.objectives.parts.ratios import log_ratio, sequence_log_ratio
from megarl.objectives.parts.terms import Terms, make_terms


@dataclass(frozen=True)
class Vespo(Objective):
    """VESPO, variational sequence-level soft policy optimization (arXiv:2602.10693; the authors' code).

    objective_t = sg(phi(w_i)) A_t log pi(t), phi(w) = w^k exp(lambda (1 - w)), w_i = prod_t rho_t over the response,
    clamped to [e^-20, e^20]. phi(1) = 1; phi is largest at w = k / lambda and falls to 0 on both sides. (k, lambda)
    depend on the advantage's sign. Every token keeps its gradient, through log pi alone.
    """

    ratio_form: ClassVar[bool] = False

    k_positive: float = number(2.0, 0, 100)
    lambda_positive: float = number(3.0, 0, 100)
    k_negative: float = number(3.0, 0, 100)
    lambda_negative: float = number(2.0, 0, 100)

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        mask, advantages = batch.loss_mask, batch.advantages.detach()
        l, clamped = log_ratio(batch.logprobs, batch.rollout_logprobs, mask)
        w = sequence_log_ratio(l, batch, mean=False).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        k = torch.where(advantages >= 0, self.k_positive, self.k_negative)
        scale = torch.where(advantages >= 0, self.lambda_positive, self.lambda_negative)
        weight = (k * w - scale * torch.expm1(w)).clamp(-SEQUENCE_LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMIT).exp()
        loss = -weight * advantages * torch.where(mask, batch.logprobs, 0)
        return make_terms(self, batch, loss, mask, l, clamped, {})

    def rule(self, batch: TokenBatch, statistics: Any) -> Rule:
        shape = (self.k_positive, self.lambda_positive, self.k_negative, self.lambda_negative)
        return Rule("gamma_sequence", constants(shape, batch.loss_mask.device), quantity="sum")
