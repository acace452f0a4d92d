from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from megarl.batch import TokenBatch
from megarl.kernels.token_pass import Rule
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import soft_clip
from megarl.objectives.parts.divergence import binary_kl, binary_tv
from megarl.objectives.parts.fields import choice, number
from megarl.objectives.parts.fused import constants
from megarl.objectives.parts.metrics import fraction_metrics
from megarl.objectives.parts.ratios import log_ratio
from megarl.objectives.parts.terms import Terms, make_terms, trust_region


@dataclass(frozen=True)
class Dppo(Objective):
    """DPPO with its binary divergences (arXiv:2602.04879; constants of its run in verl's examples/dppo_trainer).

    objective_t = M_t sg(min(rho_t, ratio_max)) A_t log pi(t), whose gradient is that of M_t rho_t A_t. M_t = 0 where
    the token has moved along its advantage (A > 0, rho > 1 or A < 0, rho < 1) and its distribution too far: D_t >
    threshold. Of the distributions of the current and the behaviour policy only the probabilities p and q of the
    sampled token are known, so all other tokens count as one: ``divergence = "tv"``: D_t = |p - q|; ``"kl"``: D_t =
    q log(q / p) + (1 - q) log((1 - q) / (1 - p)), with 1e-8 added to 1 - q and 1 - p as the authors do. threshold: 0
    for the divergence's default, .15 for tv and .05 for kl. ratio_max is the authors' code's.
    """

    ratio_form: ClassVar[bool] = False

    divergence: str = choice("tv", "kl")
    threshold: float = number(0.0, 0)
    ratio_max: float = number(10.0, 1)

    @property
    def bound(self) -> float:
        """The threshold in effect."""
        return self.threshold or {"tv": 0.15, "kl": 0.05}[self.divergence]

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        l, clamped = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        value, _ = soft_clip(l.exp(), batch, 0.0, self.ratio_max)
        divergence = binary_tv(l, batch) if self.divergence == "tv" else binary_kl(l, batch)
        masked = trust_region(l, batch) & (divergence > self.bound)
        metrics = fraction_metrics("clip_fraction", masked, batch)
        return make_terms(self, batch, torch.where(masked, 0, -value), ~masked, l, clamped, metrics)

    def rule(self, batch: TokenBatch, statistics: Any) -> Rule:
        parameters = constants((self.bound, self.ratio_max), batch.loss_mask.device)
        return Rule(f"divergence_{self.divergence}", parameters, first="clip_fraction")
