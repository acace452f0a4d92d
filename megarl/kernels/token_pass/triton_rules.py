"""The language of rules in Triton, for tiles of [TILE] tokens.

The token pass takes a rule as a compile-time constant, so that each is compiled to a kernel of its own. Comparisons
with NaN must be false, as in C, so no function uses tl.minimum or tl.maximum.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

import triton
import triton.language as tl

from megarl.kernels import constants
from megarl.kernels.token_pass.language import Outcome, Sequence, Token

LOG_RATIO_LIMIT = tl.constexpr(constants.LOG_RATIO_LIMIT)
NEVER = tl.constexpr(constants.NEVER)


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
def one_minus_exp(x):
    return tl.where(x > -0.34, -(exponential_remainder(x) * x * x + x), 1.0 - exponential(x))


@triton.jit
def where(condition, yes, no):
    return tl.where(condition, yes, no)


@triton.jit
def log(x):
    return tl.log(x)


@triton.jit
def sqrt(x):
    return tl.sqrt(x)


@triton.jit
def absolute(x):
    return tl.abs(x)


_LANGUAGE = {
    "tl": tl,
    **{kind.__name__: kind for kind in (Token, Sequence, Outcome)},
    "Any": tl.constexpr(None),  # of annotations, which Triton looks up
    "exp": exponential,
    **{f.__name__: f for f in (absolute, clamp, log, one_minus_exp, sqrt, where)},
    **{name: tl.constexpr(value) for name, value in vars(constants).items() if name.isupper()},
}


@functools.cache
def compiled(function: FunctionType) -> Any:
    """A function of the rules' language as a device function, with those that it calls."""
    names, found = function.__globals__, dict(_LANGUAGE)
    for name in function.__code__.co_names:
        if name not in found and isinstance(names.get(name), FunctionType):
            found[name] = compiled(names[name])
    return triton.jit(FunctionType(function.__code__, found | {"__name__": function.__module__}, function.__name__))
