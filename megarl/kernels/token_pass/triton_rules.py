"""One small device function per objective: what a trained token contributes, and with which gradient.

The Triton counterpart of ``csrc/include/token_rules.h``, whose comments name each rule's parameters. A function maps a
`Token`, a tile of [TILE] tokens, its `Sequence` and the rule's parameters to an `Outcome`; the token pass takes it as a
compile-time constant, so that each rule is compiled to a kernel of its own. Comparisons with NaN must be false, as in
C, so no function uses tl.minimum or tl.maximum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from megarl.kernels import constants

LOG_RATIO_LIMIT = tl.constexpr(constants.LOG_RATIO_LIMIT)
SEQUENCE_LOG_RATIO_LIMIT = tl.constexpr(constants.SEQUENCE_LOG_RATIO_LIMIT)
SMALLEST_REST = tl.constexpr(constants.SMALLEST_REST)
NEVER = tl.constexpr(constants.NEVER)


class Token(NamedTuple):
    """The inputs of a tile of tokens: [TILE] float32, except clamped (bool, whether the log-ratio was clamped) and
    index (int32, from the segment's start)."""

    logprob: Any
    rollout_logprob: Any
    old_logprob: Any
    advantage: Any
    log_ratio: Any  # l = logprob - rollout_logprob, clamped
    ratio: Any  # exp(l)
    prefix_ratio: Any  # exp(log m + l), m the minimum of the earlier ratios
    clamped: Any
    index: Any


class Sequence(NamedTuple):
    """What a rule needs of the whole sequence, see `Rule.quantity`."""

    log_ratio: Any  # [TILE] float32, mean or sum of the sequence's log-ratios
    index: Any  # 0-d int32, the first trigger, or the last token that is muted among those at M2PO's threshold


class Outcome(NamedTuple):
    """The results for a tile of tokens, [TILE] each."""

    value: Any  # objective_t; the loss is its negative
    coefficient: Any  # the derivative of value with respect to the log-prob
    kept: Any  # whether the gradient survives
    first: Any  # flag that the rule counts in a metric: clipped, vetoed or masked tokens
    second: Any  # likewise


@triton.jit
def clamp(x, low, high):
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def exponential_remainder(x):
    """(e^x - 1 - x) / x^2 for |x| <= .35."""
    p = 1.9875691500e-4 * x + 1.3981999507e-3
    p = p * x + 8.3334519073e-3
    p = p * x + 4.1665795894e-2
    p = p * x + 1.6666665459e-1
    return p * x + 5.0000001201e-1


@triton.jit
def exponential(x):
    """exp(x) for |x| <= 88, exact to 1 ulp; the hardware's is off by 20 ulp at |x| = LOG_RATIO_LIMIT. NaN stays NaN."""
    n = tl.floor(x * 1.44269504 + 0.5)
    r = (x - n * 0.693359375) + n * 2.12194440e-4
    power = tl.where(n == n, n, 0.0).to(tl.int32) + 127
    return (exponential_remainder(r) * r * r + r + 1.0) * (power << 23).to(tl.float32, bitcast=True)


@triton.jit
def excess(l, ratio):
    """ratio - 1 - l without cancellation, for ratio = exp(l)."""
    return tl.where(tl.abs(l) < 0.34, exponential_remainder(l) * l * l, ratio - 1.0 - l)


@triton.jit
def trust_region(t):
    a, l = t.advantage, t.log_ratio
    return ((a > 0) & (l > 0)) | ((a < 0) & (l < 0))


@triton.jit
def hard_clip(ratio, advantage, low, high, clamped):
    clipped = ((advantage > 0) & (ratio > high)) | ((advantage < 0) & (ratio < low))
    value = tl.where(clipped, clamp(ratio, low, high), ratio) * advantage
    kept = ~(clipped | clamped)
    return Outcome(value, tl.where(kept, value, 0.0), kept, clipped, clipped & False)


@triton.jit
def soft_clip(ratio, t, low, high):
    weight = clamp(ratio, low, high) * t.advantage
    clipped = (ratio < low) | (ratio > high)
    return Outcome(weight * t.logprob, weight, clipped | True, clipped, clipped & False)


@triton.jit
def reinforce(t, s, p):
    value = t.ratio * t.advantage
    never = t.clamped & False
    return Outcome(value, tl.where(t.clamped, 0.0, value), ~t.clamped, never, never)


@triton.jit
def clip_token(t, s, p):
    return hard_clip(t.ratio, t.advantage, p[0], p[1], t.clamped)


@triton.jit
def clip_preserving(t, s, p):
    bounded = hard_clip(t.ratio, t.advantage, p[0], p[1], t.clamped)
    coefficient = tl.where(t.clamped, 0.0, bounded.value)
    return Outcome(bounded.value, coefficient, ~t.clamped, bounded.first, bounded.second)


@triton.jit
def clip_prior(t, s, p):
    inverse = exponential(clamp(-t.rollout_logprob, 0.0, SEQUENCE_LOG_RATIO_LIMIT))
    below = 0.5 + 0.5 * tl.sqrt(clamp(1.0 - 4.0 * p[0] * inverse, 0.0, 1.0))
    above = clamp(0.5 + 0.5 * tl.sqrt(1.0 + 4.0 * p[1] * inverse), 1.0, p[2])
    return dual(hard_clip(t.ratio, t.advantage, below, above, t.clamped), t, p[2])


@triton.jit
def clip_log_ratio(t, s, p):
    l, level = t.log_ratio, p[0]
    clipped = ((t.advantage > 0) & (l > level)) | ((t.advantage < 0) & (l < -level))
    value = tl.where(clipped, exponential(clamp(l, -level, level)), t.ratio) * t.advantage
    kept = ~(clipped | t.clamped)
    return Outcome(value, tl.where(kept, value, 0.0), kept, clipped, clipped & False)


@triton.jit
def clip_prefix(t, s, p):
    return hard_clip(t.prefix_ratio, t.advantage, p[0], p[1], t.clamped)


@triton.jit
def clip_sequence_mean(t, s, p):
    return hard_clip(exponential(s.log_ratio), t.advantage, p[0], p[1], t.clamped)


@triton.jit
def dual(o, t, ratio_c):
    bound = ratio_c * t.advantage
    capped = (t.advantage < 0) & (o.value < bound)
    value = tl.where(capped, bound, o.value)
    return Outcome(value, tl.where(capped, 0.0, o.coefficient), o.kept & ~capped, o.first | capped, o.second)


@triton.jit
def clip_dual(t, s, p):
    return dual(hard_clip(t.ratio, t.advantage, p[0], p[1], t.clamped), t, p[2])


@triton.jit
def soft_clip_token(t, s, p):
    return soft_clip(t.ratio, t, p[0], p[1])


@triton.jit
def soft_clip_prefix(t, s, p):
    return soft_clip(t.prefix_ratio, t, p[0], p[1])


@triton.jit
def tapered_sequence(t, s, p):
    ratio = exponential(clamp(s.log_ratio, -SEQUENCE_LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMIT))
    negative = t.advantage < 0
    weight = tl.where(t.advantage > 0, 1.0, clamp(ratio, p[0], p[1])) * t.advantage
    first = negative & ((ratio < p[0]) | (ratio > p[1]))
    return Outcome(weight * t.logprob, weight, negative | True, first, negative & False)


@triton.jit
def gated(t, s, p):
    tau = tl.where(t.advantage > 0, p[0], p[1])
    e = exponential(clamp(-tau * (t.ratio - 1.0), -SEQUENCE_LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMIT))
    gate = 1.0 / (1.0 + e)
    coefficient = tl.where(t.clamped, 0.0, 4.0 * gate * gate * e * t.ratio * t.advantage)
    never = t.clamped & False
    return Outcome(4.0 / tau * gate * t.advantage, coefficient, ~t.clamped, never, never)


@triton.jit
def gamma_sequence(t, s, p):
    negative = t.advantage < 0
    w = clamp(s.log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    log_weight = tl.where(negative, p[2], p[0]) * w - tl.where(negative, p[3], p[1]) * (exponential(w) - 1.0)
    weight = exponential(clamp(log_weight, -SEQUENCE_LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMIT)) * t.advantage
    return Outcome(weight * t.logprob, weight, negative | True, negative & False, negative & False)


@triton.jit
def diverged(t, distance, p):
    masked = trust_region(t) & (distance > p[0])
    weight = tl.where(masked, 0.0, clamp(t.ratio, 0.0, p[1]) * t.advantage)
    return Outcome(weight * t.logprob, weight, ~masked, masked, masked & False)


@triton.jit
def divergence_tv(t, s, p):
    q = exponential(clamp(t.rollout_logprob, -SEQUENCE_LOG_RATIO_LIMIT, 0.0))
    return diverged(t, q * tl.abs(t.ratio - 1.0), p)


@triton.jit
def rest_of(x):
    """1 - e^x for x <= 0 without cancellation."""
    return tl.where(x > -0.34, -(exponential_remainder(x) * x * x + x), 1.0 - exponential(x))


@triton.jit
def divergence_kl(t, s, p):
    log_q = clamp(t.rollout_logprob, -SEQUENCE_LOG_RATIO_LIMIT, 0.0)
    rest_q = rest_of(log_q) + SMALLEST_REST
    rest_p = rest_of(clamp(log_q + t.log_ratio, -SEQUENCE_LOG_RATIO_LIMIT, 0.0)) + SMALLEST_REST
    return diverged(t, rest_q * tl.log(rest_q / rest_p) - exponential(log_q) * t.log_ratio, p)


@triton.jit
def is_trigger(t, p):
    return (t.advantage < 0) & (t.ratio < p[2])


@triton.jit
def veto(t, vetoed, p):
    o = hard_clip(t.ratio, t.advantage, p[0], p[1], t.clamped)
    value, coefficient = tl.where(vetoed, 0.0, o.value), tl.where(vetoed, 0.0, o.coefficient)
    return Outcome(value, coefficient, o.kept & ~vetoed, o.first & ~vetoed, vetoed)


@triton.jit
def veto_sequence(t, s, p):
    return veto(t, (t.advantage < 0) & (s.index < NEVER), p)


@triton.jit
def veto_suffix(t, s, p):
    return veto(t, (t.advantage < 0) & (t.index > s.index), p)


@triton.jit
def veto_non_trigger_suffix(t, s, p):
    return veto(t, (t.advantage < 0) & (t.index > s.index) & ~is_trigger(t, p), p)


@triton.jit
def veto_trigger(t, s, p):
    return veto(t, is_trigger(t, p), p)


@triton.jit
def second_moment(t, s, p):
    magnitude = tl.abs(t.log_ratio)
    muted = trust_region(t) & ((magnitude > p[0]) | ((magnitude == p[0]) & (t.index <= s.index)))
    value = tl.where(muted, 0.0, t.ratio * t.advantage)
    kept = ~(muted | t.clamped)
    return Outcome(value, tl.where(kept, value, 0.0), kept, muted, muted & False)


@triton.jit
def decoupled(t, s, p):
    proximal = t.logprob - t.old_logprob
    far = tl.abs(proximal) > LOG_RATIO_LIMIT
    behaviour = clamp(t.old_logprob - t.rollout_logprob, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = exponential(clamp(proximal, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    full = exponential(behaviour)
    weight = tl.where(full > p[2], p[2], full)
    o = hard_clip(ratio, t.advantage, p[0], p[1], far)
    return Outcome(o.value * weight, o.coefficient * weight, o.kept, o.first, o.second)


@dataclass(frozen=True)
class TritonRule:
    """A rule's function, the number of its parameters, and what it needs of the whole sequence (`Rule.quantity`)."""

    function: Any
    parameters: int
    quantity: str = "none"


TRITON_RULES = {  # by `Rule.name`
    "reinforce": TritonRule(reinforce, 0),
    "clip_token": TritonRule(clip_token, 2),
    "clip_preserving": TritonRule(clip_preserving, 2),
    "clip_prefix": TritonRule(clip_prefix, 2),
    "clip_prior": TritonRule(clip_prior, 3),
    "clip_sequence_mean": TritonRule(clip_sequence_mean, 2, "mean"),
    "clip_dual": TritonRule(clip_dual, 3),
    "soft_clip_token": TritonRule(soft_clip_token, 2),
    "soft_clip_prefix": TritonRule(soft_clip_prefix, 2),
    "tapered_sequence": TritonRule(tapered_sequence, 2, "sum"),
    "gated": TritonRule(gated, 2),
    "gamma_sequence": TritonRule(gamma_sequence, 4, "sum"),
    "divergence_tv": TritonRule(divergence_tv, 2),
    "divergence_kl": TritonRule(divergence_kl, 2),
    "veto_sequence": TritonRule(veto_sequence, 3, "trigger"),
    "veto_suffix": TritonRule(veto_suffix, 3, "trigger"),
    "veto_non_trigger_suffix": TritonRule(veto_non_trigger_suffix, 3, "trigger"),
    "veto_trigger": TritonRule(veto_trigger, 3),
    "second_moment": TritonRule(second_moment, 2, "ties"),
    "decoupled": TritonRule(decoupled, 3),
    "clip_log_ratio": TritonRule(clip_log_ratio, 1),
}
