from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megarl.batch import TokenBatch
from megarl.kernels.constants import SEQUENCE_LOG_RATIO_LIMIT
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import moves_along, mute
from megarl.objectives.parts.fields import number
from megarl.objectives.parts.prefix_ratio import prefix_log_ratio
from megarl.objectives.parts.sequences import sequence_sum
from megarl.objectives.parts.terms import Terms, outcome_terms, tokens_of
from megarl.objectives.reinforce import reinforce


@dataclass(frozen=True)
class Cppo(Objective):
    """CPPO, cumulative prefix-divergence policy optimization (arXiv:2606.10968, Eq. 8-11 with binary total variation).

    objective_t = M_t rho_t A_t. M_t = 0 where the token has moved along its advantage and w_t D_t > min(threshold,
    threshold + prefix_threshold sum_{j<t} w_j - sum_{j<t} w_j D_j): its divergence D_t = |p_t - q_t|, weighted by its
    position, is too large by itself or after a prefix that has diverged. w_t falls from 1 at the first trained token of
    the response to smallest_weight at the last. The thresholds are the paper's for a mixture of experts (dense models:
    .15) and for base models; its variant whose prefix_threshold follows each response's divergences is not implemented.
    There is no rule for the fused token pass.
    """

    threshold: float = number(0.2, 0)
    prefix_threshold: float = number(0.02, 0)
    smallest_weight: float = number(0.8, 0, 1)

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        t, log_m = tokens_of(batch)
        q = t.rollout_logprob.double().clamp(-SEQUENCE_LOG_RATIO_LIMIT, 0).exp()
        divergence = q * torch.expm1(t.log_ratio.double()).abs()
        earlier = prefix_log_ratio(torch.ones_like(q), batch, exclusive=True)  # trained tokens before this one
        tokens = sequence_sum(batch.loss_mask, batch.cu_seqlens, batch.shard)[batch.sequence_ids]
        step = (1 - self.smallest_weight) / (tokens - 1).clamp(min=1)
        z = (1 - step * earlier) * divergence
        budget = self.prefix_threshold * (earlier - step * earlier * (earlier - 1) / 2)
        most = self.threshold + (budget - prefix_log_ratio(z, batch, exclusive=True)).clamp(max=0)
        o = mute(reinforce.function(t, None), batch.loss_mask & moves_along(t) & (z > most))
        return outcome_terms(self, batch, t, log_m, o, second="mask_fraction")
