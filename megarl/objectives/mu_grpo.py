from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.kernels.constants import NEVER
from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import RULES, Outcome, Sequence, Token, rule
from megarl.objectives.objective import Objective
from megarl.objectives.parts.clipping import hard_clip, mute
from megarl.objectives.parts.fields import choice, number
from megarl.objectives.parts.quantities import first_trigger


def is_trigger(t: Token, threshold: Any) -> Any:
    return (t.advantage < 0.0) & (t.ratio < threshold)


@rule(first_trigger)
def veto_sequence(t: Token, s: Sequence, low: Any, high: Any, threshold: Any) -> Outcome:
    """All tokens with A < 0 of a response with a trigger."""
    return mute(hard_clip(t.ratio, t, low, high, t.clamped), (t.advantage < 0.0) & (s.index < NEVER))


@rule(first_trigger)
def veto_suffix(t: Token, s: Sequence, low: Any, high: Any, threshold: Any) -> Outcome:
    """Those after the first trigger, which is excluded."""
    return mute(hard_clip(t.ratio, t, low, high, t.clamped), (t.advantage < 0.0) & (t.index > s.index))


@rule(first_trigger)
def veto_non_trigger_suffix(t: Token, s: Sequence, low: Any, high: Any, threshold: Any) -> Outcome:
    """The suffix without triggers."""
    vetoed = (t.advantage < 0.0) & (t.index > s.index) & ~is_trigger(t, threshold)
    return mute(hard_clip(t.ratio, t, low, high, t.clamped), vetoed)


@rule()
def veto_trigger(t: Token, s: Sequence, low: Any, high: Any, threshold: Any) -> Outcome:
    """The triggers alone, so nothing of the rest of the sequence is needed."""
    return mute(hard_clip(t.ratio, t, low, high, t.clamped), is_trigger(t, threshold))


@dataclass(frozen=True)
class MuGrpo(Objective):
    """mu-GRPO ("How Off-Policy Can GRPO Be?", section 4): relaxed clipping with a negative-advantage veto.

    objective_t = keep_t min(rho_t A_t, clip(rho_t, ratio_min, ratio_max) A_t), rho_t = pi(t) / pi_rollout(t). keep_t is
    0 for the tokens that the rule of veto_scope vetoes, all of them in responses with A < 0; a trigger is a trained
    token with A < 0 and rho_t < veto_threshold. It is computed anew at every update and not differentiated. Vetoed
    tokens stay in the denominator.

    Inferred, because the available text lacks the paper's inline mathematics: ratio_min 0 (without the veto, trigger
    tokens keep a small gradient), veto_threshold 1e-4 (the third of the four values in the paper's sweep), token_mean.
    """

    ratio_min: float = number(0.0, 0, 1)
    ratio_max: float = number(5.0, 1)
    veto_threshold: float = number(1e-4, 0, 1)
    veto_scope: str = choice("sequence", "suffix", "non_trigger_suffix", "trigger")

    def rule(self, statistics: Any) -> Rule:
        parameters = (self.ratio_min, self.ratio_max, self.veto_threshold)
        return Rule(RULES[f"veto_{self.veto_scope}"], parameters, "clip_fraction", "veto_fraction")
