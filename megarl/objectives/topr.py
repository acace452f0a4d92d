from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from megarl.batch import TokenBatch
from megarl.kernels.token_pass import Rule
from megarl.objectives.objective import Objective
from megarl.objectives.parts.fields import number
from megarl.objectives.parts.fused import constants
from megarl.objectives.parts.metrics import fraction_metrics
from megarl.objectives.parts.ratios import log_ratio, sequence_log_ratio
from megarl.objectives.parts.terms import Terms, make_terms


@dataclass(frozen=True)
class Topr(Objective):
    """TOPR, tapered off-policy REINFORCE (arXiv:2503.14286).

    objective_t = w_i A_t log pi(t); w_i = 1 for A > 0 (a supervised step on good responses, however old), w_i =
    sg(clip(rho_seq, ratio_min, ratio_max)) for A < 0, rho_seq = prod_t rho_t over the response. Every token keeps its
    gradient, through log pi alone. The paper sums over the tokens of a response and averages over responses; token_mean
    differs from that by a constant factor (responses / tokens).
    """

    ratio_form: ClassVar[bool] = False

    ratio_min: float = number(0.0, 0, 1)
    ratio_max: float = number(1.0, 0)

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        mask, advantages = batch.loss_mask, batch.advantages.detach()
        l, clamped = log_ratio(batch.logprobs, batch.rollout_logprobs, mask)
        ratio = sequence_log_ratio(l, batch, mean=False).exp()
        weight = torch.where(advantages > 0, 1, ratio.clamp(self.ratio_min, self.ratio_max))
        saturated = (advantages < 0) & ((ratio < self.ratio_min) | (ratio > self.ratio_max))
        loss = -weight * advantages * torch.where(mask, batch.logprobs, 0)
        metrics = fraction_metrics("clip_fraction", saturated, batch)
        return make_terms(self, batch, loss, mask, l, clamped, metrics)

    def rule(self, batch: TokenBatch, statistics: Any) -> Rule:
        bounds = constants((self.ratio_min, self.ratio_max), batch.loss_mask.device)
        return Rule("tapered_sequence", bounds, first="clip_fraction", quantity="sum")
