from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megarl.kernels.constants import SEQUENCE_LOG_RATIO_LIMIT, SMALLEST_REST
from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import (
    Outcome,
    Sequence,
    Token,
    absolute,
    clamp,
    exp,
    log,
    one_minus_exp,
    rule,
    where,
)
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import moves_along
from megarl.objectives.parts.fields import choice, number


def diverged(t: Token, distance: Any, threshold: Any, ratio_max: Any) -> Outcome:
    masked = moves_along(t) & (distance > threshold)
    weight = where(masked, 0.0, clamp(t.ratio, 0.0, ratio_max) * t.advantage)
    return Outcome(weight * t.logprob, weight, ~masked, masked, t.never)


@rule()
def divergence_tv(t: Token, s: Sequence, threshold: Any, ratio_max: Any) -> Outcome:
    q = exp(clamp(t.rollout_logprob, -SEQUENCE_LOG_RATIO_LIMIT, 0.0))
    return diverged(t, q * absolute(t.ratio - 1.0), threshold, ratio_max)


@rule()
def divergence_kl(t: Token, s: Sequence, threshold: Any, ratio_max: Any) -> Outcome:
    log_q = clamp(t.rollout_logprob, -SEQUENCE_LOG_RATIO_LIMIT, 0.0)
    rest_q = one_minus_exp(log_q) + SMALLEST_REST
    rest_p = one_minus_exp(clamp(log_q + t.log_ratio, -SEQUENCE_LOG_RATIO_LIMIT, 0.0)) + SMALLEST_REST
    return diverged(t, rest_q * log(rest_q / rest_p) - exp(log_q) * t.log_ratio, threshold, ratio_max)


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

    def rule(self, statistics: Any) -> Rule:
        function = {"tv": divergence_tv, "kl": divergence_kl}[self.divergence]
        return Rule(function, (self.bound, self.ratio_max), first="clip_fraction")
