"""The language of rules: what a trained token contributes under an objective, and with which gradient.

A rule stands once, as a Python function of one token, in its objective's file. It has assignments and a return, and
uses arithmetic, comparisons, ``&``, ``|``, ``~``, the functions below, the constants of `megarl.kernels.constants` and
other functions of this kind. Torch evaluates it on tensors with one element per token; Triton compiles it; and when
megarl is built, `csrc/translate_rules.py` writes it in C++, for the CPU and CUDA.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Token(NamedTuple):
    """The inputs of a token: float32, except clamped and never (bool) and index (integer)."""

    logprob: Any
    rollout_logprob: Any
    old_logprob: Any
    advantage: Any
    log_ratio: Any  # l = logprob - rollout_logprob, clamped
    ratio: Any  # exp(l)
    prefix_ratio: Any  # exp(log m + l), m the minimum of the earlier ratios
    clamped: Any  # whether the clamp changed the log-ratio
    index: Any  # position, counted as `Sequence.index`
    never: Any  # False


class Sequence(NamedTuple):
    """What a rule needs of the token's whole sequence: what its quantity returns, which may leave one of them out."""

    value: Any
    index: Any  # a position in the sequence, or NEVER; a rule may compare it with `Token.index`, and subtract the two


class Outcome(NamedTuple):
    """What a token contributes."""

    value: Any  # objective_t; the loss is its negative
    coefficient: Any  # the derivative of value with respect to the log-prob
    kept: Any  # whether the gradient survives
    first: Any  # flag that the rule counts in a metric: clipped, vetoed or masked tokens
    second: Any  # likewise


exp, log, sqrt, absolute, where = torch.exp, torch.log, torch.sqrt, torch.abs, torch.where


def clamp(x: Any, low: Any, high: Any) -> Any:
    """x within [low, high]; NaN stays NaN."""
    return torch.where(x < low, low, torch.where(x > high, high, x))


def one_minus_exp(x: Any) -> Any:
    """1 - e^x for x <= 0 without cancellation."""
    return -torch.expm1(x)


@dataclass(frozen=True)
class RuleFunction:
    """A rule: ``function(token, sequence, *parameters)`` returns an `Outcome`.

    quantity: what it needs of the token's whole sequence, a function as those in `megarl.objectives.parts.quantities`;
    None: nothing. per_token: its values differ within a sequence; torch evaluates such a rule in all backends.
    """

    function: Callable[..., Outcome]
    quantity: Callable[..., Sequence] | None = None
    per_token: bool = False

    @property
    def computed(self) -> str:
        """The name of the quantity if the fused token passes compute it; they are given others."""
        return getattr(self.quantity, "computed", "")

    @property
    def name(self) -> str:
        """That of the function; outside of megarl with its module, so that other files may use the same one."""
        module, name = self.function.__module__, self.function.__name__
        return name if module.startswith("megarl.") else f"{module}.{name}"

    @property
    def parameters(self) -> int:
        return self.function.__code__.co_argcount - 2

    @property
    def file(self) -> Path:
        return Path(self.function.__code__.co_filename)

    @property
    def digest(self) -> str:
        """Of the source of the rule and of what rules share, by which a compiled rule of another source is noticed."""
        return _digest(self.file)


@functools.cache
def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes() + (file.parent / "parts/clipping.py").read_bytes()).hexdigest()[:16]


def computed(quantity: Callable[..., Sequence]) -> Callable[..., Sequence]:
    """Decorator of a quantity that the fused token passes compute too, under its name."""
    quantity.computed = quantity.__name__  # type: ignore[attr-defined]
    return quantity


RULES: dict[str, RuleFunction] = {}  # by name


def rule(
    quantity: Callable[..., Sequence] | None = None, per_token: bool = False
) -> Callable[[Callable[..., Outcome]], RuleFunction]:
    """Decorator of a rule."""

    def register(function: Callable[..., Outcome]) -> RuleFunction:
        made = RuleFunction(function, quantity, per_token)
        RULES[made.name] = made
        return made

    return register
