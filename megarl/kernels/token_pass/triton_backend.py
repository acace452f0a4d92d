"""The token pass in Triton: one kernel, which takes an objective's rule as a compile-time constant.

A program goes through one segment, tile by tile. Sums are added lane by lane, then over the lanes, then over the
segments, in an order that depends only on the lengths; histograms are integers. So results are bitwise reproducible.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from megarl.kernels.constants import BAD_PREFIX, BINS, BINS_PER_SIGN, HISTOGRAM_BASE, HISTOGRAM_SHIFT
from megarl.kernels.token_pass.language import Outcome, RuleFunction, Sequence, Token
from megarl.kernels.token_pass.triton_rules import LOG_RATIO_LIMIT, NEVER, clamp, compiled, excess, exponential
from megarl.kernels.tokens import Tokens

TILE = 256  # tokens per tile
WARPS = 4
_ROW = tl.constexpr(32)  # number of sums per segment: those of SUMS, and the loss
_STRETCH = tl.constexpr(64)  # tiles that are summed in float32 before the sum is added to a float64 sum
_BINS = tl.constexpr(BINS)
_PER_SIGN = tl.constexpr(BINS_PER_SIGN)
_TABLE = tl.constexpr(triton.next_power_of_2(BINS))  # its last bin takes the untrained tokens
_SHIFT = tl.constexpr(HISTOGRAM_SHIFT)
_BASE = tl.constexpr(HISTOGRAM_BASE)
_LOG_BAD_PREFIX = tl.constexpr(math.log(BAD_PREFIX))


@triton.jit
def _less(a, b):
    """The smaller of two, the first if they are equal; NaN if one is NaN."""
    return tl.where((b < a) | (b != b), b, a)


@triton.jit
def _less_before(a, a_before, b, b_before):
    """Operator of a scan: the minimum of a range of tokens, and the minimum of the range without its last token."""
    return _less(a, b), _less(a, b_before)


@triton.jit
def _log_ratio(logprobs, rollout_logprobs, mask, index, end):
    """For a tile: which tokens train, both log-probs (0 where not trained), and the log-ratio before the clamp."""
    inside = index < end
    on = tl.load(mask + index, mask=inside, other=0) != 0
    p = tl.where(on, tl.load(logprobs + index, mask=inside, other=0.0), 0.0)
    q = tl.where(on, tl.load(rollout_logprobs + index, mask=inside, other=0.0), 0.0)
    return on, p, q, p - q


@triton.jit
def _whole_sequence(
    argument,  # pointer to the rule's last parameter
    logprobs, rollout_logprobs, advantages, mask, start, end,
    segment, given_value, given_index, QUANTITY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The `Sequence` of a segment: given, or from a first pass over its tokens, which leaves them in the cache."""
    value, index = 0.0, 0
    if given_value is not None:
        value = tl.load(given_value + segment)
    elif QUANTITY == "mean_log_ratio" or QUANTITY == "sum_log_ratio":
        total, trained = tl.zeros((TILE,), tl.float64), tl.zeros((TILE,), tl.int32)
        for tile in range(start, end, TILE):
            on, _, _, l = _log_ratio(logprobs, rollout_logprobs, mask, tile + tl.arange(0, TILE), end)
            total += clamp(l, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).to(tl.float64)
            trained += on.to(tl.int32)
        whole = tl.sum(total, 0)
        if QUANTITY == "mean_log_ratio":
            whole /= tl.maximum(tl.sum(trained, 0), 1)
        value = whole.to(tl.float32)
    if given_index is not None:
        index = tl.load(given_index + segment)
    elif QUANTITY == "first_trigger":
        threshold = tl.load(argument).to(tl.float32)
        first = tl.full((TILE,), NEVER, tl.int32)
        for tile in range(start, end, TILE):
            at = tile + tl.arange(0, TILE)
            on, _, _, l = _log_ratio(logprobs, rollout_logprobs, mask, at, end)
            negative = tl.load(advantages + at, mask=at < end, other=0.0) < 0
            fires = on & negative & (exponential(clamp(l, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) < threshold)
            first = tl.minimum(first, tl.where(fires, at - start, NEVER))
        index = tl.min(first, 0)
    return Sequence(tl.zeros((TILE,), tl.float32) + value, index)


@triton.jit
def _bin_of(l, on):
    bits = l.to(tl.int32, bitcast=True)
    step = ((bits & 0x7FFFFFFF) >> _SHIFT) - _BASE
    step = tl.minimum(tl.maximum(step, 0), _PER_SIGN)
    return tl.where(on, _PER_SIGN + tl.where(bits < 0, -step, step), _TABLE - 1)


@triton.jit
def _join8(a, b, c, d, e, f, g, h):
    return tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))


@triton.jit
def _sums(t, log_m, dampened, on, o):
    """Two [TILE, 2, 2, 2, 2] float32: what each token adds to each sum; the indices after the first are the bits of the
    sum's number in SUMS, lowest first, and the choice of the tensor is its highest bit.

    Two tensors instead of one save registers: a thread is done with the first before it computes the second.
    """
    above, below = (t.advantage > 0).to(tl.float32), (t.advantage < 0).to(tl.float32)
    trains = on.to(tl.float32)
    ratio, l = tl.where(on, t.ratio, 0.0), t.log_ratio  # 0 where not trained
    e = excess(l, t.ratio)
    trust = _trust_region(t)
    kept = o.kept.to(tl.float32)
    first, second = o.first.to(tl.float32), o.second.to(tl.float32)
    bad = on & (log_m < _LOG_BAD_PREFIX)
    by_token, by_prefix = on & (t.ratio < dampened), on & (t.prefix_ratio < dampened)
    square, trust_kept = l * l, trust & o.kept
    a = _join8(trains, above, below, ratio, ratio * ratio, (l + e) * (l + e), l, e)
    b = _join8(
        square, trust.to(tl.float32), tl.where(trust, square, 0.0), trust_kept.to(tl.float32),
        tl.where(trust_kept, square, 0.0), t.clamped.to(tl.float32), kept, kept * above,
    )  # fmt: skip
    c = _join8(
        kept * below, first, first * above, first * below, second, second * above, second * below, bad.to(tl.float32)
    )
    d = _join8(
        by_token.to(tl.float32), (by_token & bad).to(tl.float32), by_prefix.to(tl.float32),
        (by_prefix & bad).to(tl.float32), tl.where(t.advantage > 0, ratio, 0.0), tl.where(t.advantage < 0, ratio, 0.0),
        tl.where(t.advantage > 0, -o.value, 0.0), -o.value,
    )  # fmt: skip
    return tl.join(a, b), tl.join(c, d)


@triton.jit
def _trust_region(t):
    a, l = t.advantage, t.log_ratio
    return ((a > 0) & (l > 0)) | ((a < 0) & (l < 0))


@triton.jit
def _loaded(parameters, PARAMETERS: tl.constexpr):
    """The rule's parameters."""
    p = ()
    for i in tl.static_range(PARAMETERS):
        p = p + (tl.load(parameters + i).to(tl.float32),)  # type: ignore[assignment]
    return p


@triton.jit
def token_pass_kernel(
    parameters, dampened,  # [PARAMETERS] float64, and a float32
    logprobs, rollout_logprobs, old_logprobs,  # [T] float32, the last one or None
    advantages, mask, cu_seqlens,  # [T] float32, [T] bool, [segments + 1] int32
    prefix_min, given_value, given_index,  # [segments] each, see `Given`, or None
    loss, coefficient, kept, rows, histograms,  # [T] each, [segments, 32] float64, [2, BINS] int64
    RULE: tl.constexpr, PARAMETERS: tl.constexpr, QUANTITY: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    start, end = tl.load(cu_seqlens + segment), tl.load(cu_seqlens + segment + 1)
    p = _loaded(parameters, PARAMETERS)
    s = _whole_sequence(
        parameters + PARAMETERS - 1, logprobs, rollout_logprobs, advantages, mask, start, end,
        segment, given_value, given_index, QUANTITY, TILE,
    )  # fmt: skip
    least = tl.full((), float("inf"), tl.float32)
    if prefix_min is not None:
        least = tl.load(prefix_min + segment)
    row = tl.zeros((_ROW,), tl.float64)
    by_ratio, by_minimum = tl.zeros((_TABLE,), tl.int32), tl.zeros((_TABLE,), tl.int32)
    for stretch in range(start, end, _STRETCH * TILE):
        first_sums = tl.zeros((TILE // 2, 2, 2, 2, 2), tl.float32)
        second_sums = tl.zeros((TILE // 2, 2, 2, 2, 2), tl.float32)
        for tile in range(stretch, tl.minimum(end, stretch + _STRETCH * TILE), TILE):
            at = tile + tl.arange(0, TILE)
            inside = at < end
            on, logprob, rollout, difference = _log_ratio(logprobs, rollout_logprobs, mask, at, end)
            advantage = tl.where(on, tl.load(advantages + at, mask=inside, other=0.0), 0.0)
            old = logprob
            if old_logprobs is not None:
                old = tl.where(on, tl.load(old_logprobs + at, mask=inside, other=0.0), 0.0)
            l = clamp(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            mine = tl.where(on, l, float("inf"))
            _, before = tl.associative_scan((mine, tl.full((TILE,), float("inf"), tl.float32)), 0, _less_before)
            before = _less(least, before)
            least = _less(least, tl.reduce(mine, 0, _less))
            log_m = tl.where(before == float("inf"), 0.0, before)
            clamped = tl.abs(difference) > LOG_RATIO_LIMIT
            ratio, prefix_ratio, never = exponential(l), exponential(log_m + l), clamped & False
            t = Token(logprob, rollout, old, advantage, l, ratio, prefix_ratio, clamped, at - start, never)
            o = RULE(t, s, *p)
            o = Outcome(
                tl.where(on, o.value, 0.0), tl.where(on, o.coefficient, 0.0), on & o.kept, on & o.first, on & o.second
            )
            tl.store(loss + at, -o.value, mask=inside)
            tl.store(coefficient + at, -o.coefficient, mask=inside)
            tl.store(kept + at, o.kept, mask=inside)
            first, second = _sums(t, log_m, dampened, on, o)
            first_sums += tl.sum(first.reshape(2, TILE // 2, 2, 2, 2, 2), 0)  # within a thread
            second_sums += tl.sum(second.reshape(2, TILE // 2, 2, 2, 2, 2), 0)
            by_ratio += tl.histogram(_bin_of(l, on), _TABLE)
            by_minimum += tl.histogram(_bin_of(log_m, on), _TABLE)
        sums = tl.join(tl.sum(first_sums, 0), tl.sum(second_sums, 0))
        row += tl.permute(sums, (4, 3, 2, 1, 0)).reshape(_ROW).to(tl.float64)
    tl.store(rows + segment * _ROW + tl.arange(0, _ROW), row)
    bins = tl.arange(0, _TABLE)
    tl.atomic_add(histograms + bins, by_ratio.to(tl.int64), mask=(bins < _BINS) & (by_ratio > 0), sem="relaxed")
    counted = (bins < _BINS) & (by_minimum > 0)
    tl.atomic_add(histograms + _BINS + bins, by_minimum.to(tl.int64), mask=counted, sem="relaxed")


def launch(
    rule: RuleFunction,
    parameters: torch.Tensor,
    dampened: float,
    tokens: Tokens,
    given: tuple[torch.Tensor | None, ...],  # the fields of `Given`
    loss: torch.Tensor,
    coefficient: torch.Tensor,
    kept: torch.Tensor,
    segment_sums: torch.Tensor,
    sums: torch.Tensor,
    histograms: torch.Tensor,
) -> None:
    """Fill the outputs, of which the histograms must be zero, on a GPU, or on a CPU in Triton's interpreter. The values
    of cu_seqlens are not checked, because the host would wait for the device."""
    rows = sums.new_empty(tokens.segments, _ROW.value)
    of_tokens = (tokens.logprobs, tokens.rollout_logprobs, tokens.old_logprobs, tokens.advantages, tokens.mask)
    if tokens.segments:
        with torch.cuda.device_of(loss):
            token_pass_kernel[(tokens.segments,)](
                parameters, dampened, *of_tokens, tokens.cu_seqlens, *given,
                loss, coefficient, kept, rows, histograms, **kernel_constants(rule), **LAUNCH_OPTIONS,
            )  # fmt: skip
    segment_sums.copy_(rows[:, :: len(sums)])  # the first of the sums, the number of tokens, and the loss
    torch.sum(rows[:, : len(sums)], 0, out=sums)


# With up to 256 registers a thread, two blocks share a multiprocessor. Without a limit ptxas spills registers to reach
# a round number; its results are not monotonic in the limit, see docs/kernels.md.
LAUNCH_OPTIONS = dict(num_warps=WARPS, num_stages=1, enable_fp_fusion=True, maxnreg=240)


def kernel_constants(rule: RuleFunction) -> dict[str, Any]:
    """The constexpr arguments of `token_pass_kernel`."""
    function = compiled(rule.function)
    return dict(RULE=function, PARAMETERS=rule.parameters, QUANTITY=rule.computed, TILE=TILE)
