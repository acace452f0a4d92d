from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.batch import TokenBatch
from megarl.objectives.clipping import hard_clip
from megarl.objectives.fields import choice, number
from megarl.objectives.prefix import dampen_metrics
from megarl.objectives.ratios import log_ratio, prefix_min_log_ratio
from megarl.objectives.terms import Objective, Terms, fraction_metrics, make_terms


@dataclass(frozen=True)
class PrefixRatioGrpo(Objective):
    """Prefix-Ratio GRPO (Eq. 3-5, without its KL term).

    objective_t = min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t), r_t = m_t rho_t, m_t = min_{i<t} rho_i over
    the earlier trained tokens of the response, 1 for the first; averaged within a response and then over responses.
    Gradient: r_t A_t grad log pi(t) where not clipped. m_t carries none: the text does not say, but with a gradient a
    token would be pushed once for every token after it, against the selectivity that the paper argues for.
    """

    eps_low: float = number(0.2, 0, 1)
    eps_high: float = number(0.2, 0)
    aggregation: str = choice("sequence_mean", "token_mean")

    def __call__(self, batch: TokenBatch, statistics: Any = None) -> Terms:
        l, clamped = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        prefix = prefix_min_log_ratio(l, batch)
        ratio = (prefix + l).exp()
        value, clipped = hard_clip(ratio, batch.advantages, 1 - self.eps_low, 1 + self.eps_high)
        metrics = fraction_metrics("clip_fraction", clipped, batch) | dampen_metrics(ratio, prefix, batch)
        return make_terms(self, batch, -value, ~clipped & ~clamped, l, clamped, metrics)
