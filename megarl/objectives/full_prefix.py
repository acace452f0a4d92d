from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.batch import TokenBatch
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import soft_clip
from megarl.objectives.parts.fields import number
from megarl.objectives.parts.prefix_ratio import prefix_log_ratio
from megarl.objectives.parts.terms import Terms, outcome_terms, tokens_of


@dataclass(frozen=True)
class FullPrefix(Objective):
    """CISPO with the full prefix ratio (MinPRO paper, section 6.2, "Direct Use of the Prefix Ratio"; Theorem 1).

    objective_t = sg(clip(rho_{1:t}, 1 - eps_low, 1 + eps_high)) A_t log pi(t), rho_{1:t} = prod_{i<=t} rho_i over the
    trained tokens of the response, averaged over tokens. The exact correction of the policy gradient, whose variance
    and length bias `MinPro` avoids. Every token keeps its gradient, through log pi alone.
    """

    ratio_form: ClassVar[bool] = False

    eps_low: float = number(1.0, 0, 1)
    eps_high: float = number(4.0, 0)

    def terms(self, batch: TokenBatch, statistics: Any) -> Terms:
        t, log_m = tokens_of(batch)
        o = soft_clip(prefix_log_ratio(t.log_ratio, batch).exp(), t, 1 - self.eps_low, 1 + self.eps_high)
        return outcome_terms(self, batch, t, log_m, o, "clip_fraction")
