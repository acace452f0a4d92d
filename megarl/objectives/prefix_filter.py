from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.distributed import ProcessGroup

from megarl.batch import TokenBatch
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import mute, soft_clip
from megarl.objectives.parts.fields import number
from megarl.objectives.parts.prefix_ratio import lowest_threshold, prefix_sums
from megarl.objectives.parts.ratios import log_ratio
from megarl.objectives.parts.terms import Terms, outcome_terms, tokens_of


@dataclass(frozen=True)
class PrefixFilter(Objective):
    """CISPO without the tokens of the lowest prefix ratio (MinPRO paper, section 6.2, "Indirect Use").

    objective_t = K_t sg(clip(rho_t, 1 - eps_low, 1 + eps_high)) A_t log pi(t), averaged over all trained tokens. K_t is
    0 for the filter_fraction of the batch's tokens with the lowest rho_{1:t} = prod_{i<=t} rho_i, and not
    differentiated. Two points are inferred, because the paper does not state them: that the filter is applied to
    `Cispo`, and that removed tokens stay in the denominator.
    """

    needs_statistics: ClassVar[bool] = True
    ratio_form: ClassVar[bool] = False

    eps_low: float = number(1.0, 0, 1)
    eps_high: float = number(4.0, 0)
    filter_fraction: float = number(0.01, 0, 1)

    def statistics(self, batch: TokenBatch, group: ProcessGroup | None = None, backend: str = "torch") -> torch.Tensor:
        """The lowest of `prefix_sums` that is not filtered out, over all ranks of `group`."""
        l, _ = log_ratio(batch.logprobs, batch.rollout_logprobs, batch.loss_mask)
        return lowest_threshold(prefix_sums(l, batch), batch.loss_mask, self.filter_fraction, group)

    def terms(self, batch: TokenBatch, statistics: torch.Tensor) -> Terms:
        t, log_m = tokens_of(batch)
        o = soft_clip(t.ratio, t, 1 - self.eps_low, 1 + self.eps_high)
        removed = batch.loss_mask & (prefix_sums(t.log_ratio, batch) < statistics)
        return outcome_terms(self, batch, t, log_m, mute(o, removed), "clip_fraction", "filter_fraction")
