from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megarl.batch import TokenBatch
from megarl.kernels.token_pass import Rule
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import hard_clip
from megarl.objectives.parts.fields import choice, number
from megarl.objectives.parts.fused import constants
from megarl.objectives.parts.metrics import fraction_metrics
from megarl.objectives.parts.prefix_min import prefix_min_log_ratio, sum_at_minima
from megarl.objectives.parts.ratios import log_ratio
from megarl.objectives.parts.terms import Terms, make_terms


@dataclass(frozen=True)
class PrefixRatioGrpo(Objective):
    """Prefix-Ratio GRPO (Eq. 3-5, without its KL term).

    objective_t = min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t), r_t = m_t rho_t, m_t = min_{i<t} rho_i over
    the earlier trained tokens of the response, 1 for the first; averaged within a response and then over responses.
    Gradient: r_t A_t grad log pi(t) where not clipped. With prefix_gradient "stopped" no gradient flows through m_t:
    the paper does not say whether it does, but with a gradient a token is pushed once for every later token, against
    the selectivity that the paper argues for. "full" is Eq. 5 as it stands, without a stop-gradient: the token whose
    ratio is m_t (the first among equals) also gets the gradient r_t A_t of every later token that has this minimum and
    is not clipped. In both variants ``kept`` refers to the tokens' own gradients.
    """

    prefix_gradient: str = choice("stopped", "full")
    eps_low: float = number(0.2, 0, 1)
    eps_high: float = number(0.2, 0)
    aggregation: str = choice("sequence_mean", "token_mean")

    @property
    def couples_tokens(self) -> bool:
        return self.prefix_gradient == "full"

    @property
    def dampened_below(self) -> float:
        return self.dampen_threshold or 1 - self.eps_low

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        l, clamped = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        prefix = prefix_min_log_ratio(l, batch)
        ratio = (prefix + l).exp()
        value, clipped = hard_clip(ratio, batch.advantages, 1 - self.eps_low, 1 + self.eps_high)
        if self.prefix_gradient == "full":
            # adds 0 to the value, but adds the gradient through m_t to earlier tokens, on whichever rank they are
            value = value + sum_at_minima(l, torch.where(clipped, 0, value), batch).to(l.dtype) * (l - l.detach())
        metrics = fraction_metrics("clip_fraction", clipped, batch)
        return make_terms(self, batch, -value, ~clipped & ~clamped, l, clamped, metrics)

    def rule(self, batch: TokenBatch, statistics: Any) -> Rule | None:
        if self.prefix_gradient == "full":  # the fused pass does not differentiate a minimum
            return None
        bounds = constants((1 - self.eps_low, 1 + self.eps_high), batch.loss_mask.device)
        return Rule("clip_prefix", bounds, first="clip_fraction")
