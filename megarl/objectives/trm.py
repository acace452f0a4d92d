from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megarl.batch import TokenBatch
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import mute
from megarl.objectives.parts.fields import choice, number
from megarl.objectives.parts.sequences import sequence_sum
from megarl.objectives.parts.terms import Terms, outcome_terms, tokens_of
from megarl.objectives.reinforce import reinforce


@dataclass(frozen=True)
class Trm(Objective):
    """Trust region masking (arXiv:2512.23075), with the sampled divergences of its authors' code in verl.

    objective_t = M_i rho_t A_t; M_i = 0 for a response of which any trained token has D_t > threshold, whatever its
    advantage. D_t estimates the divergence of the two policies at the token from the sampled token alone: k2 = log^2
    rho / 2 or k3 = rho - 1 - log rho (verl's ``seq_max_k2``, ``seq_max_k3``); the paper's bound is on the divergence
    over the whole vocabulary. The default threshold is that of verl's example with k2. There is no rule for the fused
    token pass.
    """

    estimator: str = choice("k2", "k3")
    threshold: float = number(2.5, 0)

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        t, log_m = tokens_of(batch)
        x = t.log_ratio.double()
        divergence = torch.expm1(x) - x if self.estimator == "k3" else x.square() / 2
        far = sequence_sum(batch.loss_mask & (divergence > self.threshold), batch.cu_seqlens, batch.shard)
        masked = batch.loss_mask & (far[batch.sequence_ids] > 0)
        o = mute(reinforce.function(t, None), masked)
        return outcome_terms(self, batch, t, log_m, o, second="mask_fraction")
