from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroup

from megarl.batch import TokenBatch
from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import Outcome, Sequence, Token, absolute, clamp, exp, rule, where
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import moves_along
from megarl.objectives.parts.fields import choice, number
from megarl.objectives.parts.quantities import last_tie
from megarl.objectives.parts.second_moment import select_second_moment, winsorising_level


@rule(last_tie)
def second_moment(t: Token, s: Sequence, threshold: Any, order: Any) -> Outcome:
    """threshold: of |l|; order: the tie order from which on tokens at the threshold are muted, see `Sequence.index`."""
    size = absolute(t.log_ratio)
    muted = moves_along(t) & ((size > threshold) | ((size == threshold) & (t.index <= s.index)))
    value = where(muted, 0.0, t.ratio * t.advantage)
    kept = ~(muted | t.clamped)
    return Outcome(value, where(kept, value, 0.0), kept, muted, t.never)


@rule()
def clip_log_ratio(t: Token, s: Sequence, level: Any) -> Outcome:
    """The comparison is exact where the level is the |l| of a token."""
    l = t.log_ratio
    clipped = ((t.advantage > 0.0) & (l > level)) | ((t.advantage < 0.0) & (l < -level))
    value = where(clipped, exp(clamp(l, -level, level)), t.ratio) * t.advantage
    kept = ~(clipped | t.clamped)
    return Outcome(value, where(kept, value, 0.0), kept, clipped, t.never)


@dataclass(frozen=True)
class M2Po(Objective):
    """M2PO ("Prosperity before Collapse", Algorithm 1 and Eq. 5).

    objective_t = M_t rho_t A_t, averaged over all trained tokens, masked ones too (footnote 2). No clip. M is 0 for the
    trust-region tokens (A > 0, rho > 1 or A < 0, rho < 1) with the largest squared log-ratios l^2, as many as it takes
    for the mean of l^2 over the other trust-region tokens of the batch to be at most m2_threshold. Gradient:
    M_t rho_t A_t grad log pi(t); M is not differentiated.

    variant "released" is the authors' code: instead of a mask, PPO clip bounds exp(-tau), exp(tau), tau the level at
    which the winsorised mean of min(l^2, tau^2) over the trust region reaches m2_threshold. It mutes more tokens. That
    code computes tau per micro-batch and rank (``statistics_scope = "micro"``) and measures l against log-probs that
    the trainer recomputed (put them into ``rollout_logprobs``).
    """

    needs_statistics: ClassVar[bool] = True

    m2_threshold: float = number(0.04, 0)
    variant: str = choice("paper", "released")

    def statistics(
        self, batch: TokenBatch, group: ProcessGroup | None = None, backend: str = "torch"
    ) -> tuple[torch.Tensor, ...]:
        """The parameters of the rule, over all ranks of `group`: of |l| the mask's threshold with its tie order (paper)
        or the largest that keeps its gradient (released)."""
        if self.variant == "paper":
            return select_second_moment(batch, self.m2_threshold, group, backend)
        return (winsorising_level(batch, self.m2_threshold, group, backend),)

    def rule(self, statistics: tuple[torch.Tensor, ...]) -> Rule:
        function = second_moment if self.variant == "paper" else clip_log_ratio
        return Rule(function, statistics, first="m2_mask_fraction")
