"""Functions that rules share, in the language of `megarl.kernels.token_pass.language`."""

from __future__ import annotations

from typing import Any

from megarl.kernels.token_pass.language import Outcome, Token, clamp, where


def hard_clip(ratio: Any, t: Token, low: Any, high: Any, clamped: Any) -> Outcome:
    """min(r A, clip(r, low, high) A), first where the clipped branch is strictly smaller.

    These are the tokens with A > 0 and r > high, or A < 0 and r < low. Their value does not depend on r, so they get no
    gradient; the others get that of a ratio, r A.
    """
    clipped = ((t.advantage > 0.0) & (ratio > high)) | ((t.advantage < 0.0) & (ratio < low))
    value = where(clipped, clamp(ratio, low, high), ratio) * t.advantage
    kept = ~(clipped | clamped)
    return Outcome(value, where(kept, value, 0.0), kept, clipped, t.never)


def soft_clip(ratio: Any, t: Token, low: Any, high: Any) -> Outcome:
    """sg(clip(r, low, high)) A log pi, first where the clip changes the weight; every token keeps its gradient."""
    weight = clamp(ratio, low, high) * t.advantage
    return Outcome(weight * t.logprob, weight, ~t.never, (ratio < low) | (ratio > high), t.never)


def dual_clip(o: Outcome, t: Token, bound: Any) -> Outcome:
    """max(value, bound A) for A < 0 (arXiv:1912.09729); no gradient where the bound is strictly larger.

    It limits the loss of tokens with A < 0 and a large ratio.
    """
    least = bound * t.advantage
    capped = (t.advantage < 0.0) & (o.value < least)
    value = where(capped, least, o.value)
    return Outcome(value, where(capped, 0.0, o.coefficient), o.kept & ~capped, o.first | capped, o.second)


def mute(o: Outcome, muted: Any) -> Outcome:
    """The outcome without the muted tokens, which are second."""
    value = where(muted, 0.0, o.value)
    return Outcome(value, where(muted, 0.0, o.coefficient), o.kept & ~muted, o.first & ~muted, muted)


def moves_along(t: Token) -> Any:
    """Whether the ratio has already moved in the direction of the advantage (A > 0, rho > 1 or A < 0, rho < 1)."""
    return ((t.advantage > 0.0) & (t.log_ratio > 0.0)) | ((t.advantage < 0.0) & (t.log_ratio < 0.0))
