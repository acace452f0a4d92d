from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from megarl.batch import TokenBatch
from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import Outcome, Sequence, Token, rule
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import hard_clip
from megarl.objectives.parts.fields import choice, number
from megarl.objectives.parts.prefix_min import sum_at_minima
from megarl.objectives.parts.ratios import log_ratio
from megarl.objectives.parts.terms import Terms


@rule()
def clip_prefix(t: Token, s: Sequence, low: Any, high: Any) -> Outcome:
    return hard_clip(t.prefix_ratio, t, low, high, t.clamped)


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

    def rule(self, statistics: Any) -> Rule:
        return Rule(clip_prefix, (1 - self.eps_low, 1 + self.eps_high), first="clip_fraction")

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        terms = super().terms(batch, statistics)
        if not self.couples_tokens:
            return terms
        # adds 0 to the loss, but adds the gradient through m_t to earlier tokens, on whichever rank they are
        l, _ = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        pushed = sum_at_minima(l, torch.where(terms.flags["clip_fraction"], 0, -terms.loss), batch).to(l.dtype)
        return replace(terms, loss=terms.loss - pushed * (l - l.detach()))
