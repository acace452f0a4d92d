from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megarl.batch import TokenBatch
from megarl.kernels.constants import SEQUENCE_LOG_RATIO_LIMIT
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import hard_clip
from megarl.objectives.parts.fields import choice, number
from megarl.objectives.parts.prefix_ratio import prefix_log_ratio
from megarl.objectives.parts.terms import Terms, outcome_terms, tokens_of


@dataclass(frozen=True)
class Ctpo(Objective):
    """CTPO, cumulative token policy optimization (arXiv:2605.07331, section 3.3; the authors' code).

    objective_t = min(c_t A_t, clip(c_t, e^(-eps_low sqrt(t)), e^(eps_high sqrt(t))) A_t), c_t = prod_{i<=t} rho_i and t
    counted from 1 over the trained tokens of the response; the bounds widen as the deviation of log c_t does. As in the
    code, a token's gradient is c_t A_t grad log pi(t), through its own log-prob alone. There is no rule for the fused
    token pass.
    """

    eps_low: float = number(0.025, 0)
    eps_high: float = number(0.05, 0)
    aggregation: str = choice("sequence_mean", "token_mean")

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        t, log_m = tokens_of(batch)
        log_ratio = prefix_log_ratio(t.log_ratio, batch).clamp(-SEQUENCE_LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMIT)
        width = prefix_log_ratio(torch.ones_like(log_ratio), batch).sqrt()
        low, high = (-self.eps_low * width).exp(), (self.eps_high * width).exp()
        o = hard_clip(log_ratio.exp(), t, low, high, t.clamped)
        return outcome_terms(self, batch, t, log_m, o, "clip_fraction")
