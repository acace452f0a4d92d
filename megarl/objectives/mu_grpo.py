from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megarl.batch import TokenBatch
from megarl.kernels.token_pass import Quantity, Rule
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import hard_clip
from megarl.objectives.parts.fields import choice, number
from megarl.objectives.parts.fused import constants
from megarl.objectives.parts.metrics import fraction_metrics
from megarl.objectives.parts.ratios import log_ratio
from megarl.objectives.parts.terms import Terms, make_terms
from megarl.objectives.parts.veto import SCOPES, veto_mask


@dataclass(frozen=True)
class MuGrpo(Objective):
    """mu-GRPO ("How Off-Policy Can GRPO Be?", section 4): relaxed clipping with a negative-advantage veto.

    objective_t = keep_t min(rho_t A_t, clip(rho_t, ratio_min, ratio_max) A_t), rho_t = pi(t) / pi_rollout(t). keep_t is
    0 for the tokens of `parts.veto.veto_mask`, all of them in responses with A < 0. It is computed anew at every update
    and not differentiated. Vetoed tokens stay in the denominator.

    Inferred, because the available text lacks the paper's inline mathematics: ratio_min 0 (without the veto, trigger
    tokens keep a small gradient), veto_threshold 1e-4 (the third of the four values in the paper's sweep), token_mean.
    """

    ratio_min: float = number(0.0, 0, 1)
    ratio_max: float = number(5.0, 1)
    veto_threshold: float = number(1e-4, 0, 1)
    veto_scope: str = choice(*SCOPES)

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        l, clamped = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        ratio = l.exp()
        vetoed = veto_mask(ratio, batch, self.veto_threshold, self.veto_scope)
        value, clipped = hard_clip(ratio, batch.advantages, self.ratio_min, self.ratio_max)
        metrics = fraction_metrics("clip_fraction", clipped & ~vetoed, batch)
        metrics |= fraction_metrics("veto_fraction", vetoed, batch)
        kept = ~vetoed & ~clipped & ~clamped
        return make_terms(self, batch, -torch.where(vetoed, 0, value), kept, l, clamped, metrics)

    def rule(self, batch: TokenBatch, statistics: Any) -> Rule:
        parameters = constants((self.ratio_min, self.ratio_max, self.veto_threshold), batch.loss_mask.device)
        # each trigger vetoes only itself, so nothing of the rest of the sequence is needed
        quantity: Quantity = "none" if self.veto_scope == "trigger" else "trigger"
        return Rule(f"veto_{self.veto_scope}", parameters, "clip_fraction", "veto_fraction", quantity)
