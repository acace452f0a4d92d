"""One pass over packed tokens: log-ratio, running prefix minimum, weight and mask, loss, gradient and metric sums.

What a token contributes depends on the rule, one small function for each kind of device: a type in
``csrc/include/token_rules.h`` for the CPU and CUDA, a function in `triton_rules` for Triton. The readable definition is
the objective itself (`megarl.objectives`, backend ``torch``).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from megarl.kernels import library
from megarl.kernels.constants import BAD_PREFIX
from megarl.kernels.token_pass.compiled import token_pass_compiled
from megarl.kernels.tokens import Tokens, check_backend

Quantity = Literal["none", "mean", "sum", "trigger", "ties"]


@dataclass(frozen=True)
class Rule:
    """Which function the pass applies to a token, and the metric names of the two flags that the function sets.

    quantity: what the function must know of the token's whole sequence: nothing; mean or sum of its log-ratios; its
    first trigger (A < 0 and ratio < parameters[2]); or the order of ties.
    """

    name: str
    parameters: torch.Tensor  # [P] float64 on the device of the tokens
    first: str | None = None
    second: str | None = None
    quantity: Quantity = "none"
    scalars: dict[str, torch.Tensor] = field(default_factory=dict)  # metrics that are the same for every token


@dataclass(frozen=True)
class Inherited:
    """What each segment must know of the rest of its sequence, where segments are not whole sequences."""

    prefix_min: torch.Tensor  # [segments] float32, least log-ratio of the earlier segments, inf for none
    log_ratio: torch.Tensor  # [segments] float32, mean or sum over the whole sequence, see `Rule.quantity`
    first_trigger: torch.Tensor  # [segments] int32, of the sequence, counted from the segment's start


@dataclass(frozen=True)
class PassResult:
    loss: torch.Tensor  # [T] float32, carries gradient to the log-probs
    kept: torch.Tensor  # [T] bool
    segment_sums: torch.Tensor  # [segments, 2] float64: trained tokens, loss
    sums: torch.Tensor  # [len(SUMS)] float64
    histograms: torch.Tensor  # [2, BINS] int64: log-ratio, prefix minimum


def token_pass(
    rule: Rule,
    tokens: Tokens,
    inherited: Inherited | None = None,  # None: segments are whole sequences
    places: torch.Tensor | None = None,  # [segments] int64 for the quantity "ties", see `tie_places`
    backend: str = "cpp",
    dampened: float = BAD_PREFIX,  # effective ratio below which a token counts as dampened
) -> PassResult:
    """Forward and gradient at once; `UserError` if `backend` is not installed. No host sync.

    Results do not depend on the number of threads. The torch backend is the objective itself.
    """
    check_backend(backend, tokens.logprobs.device)
    from_sequence = (None, None, None) if inherited is None else tuple(vars(inherited).values())
    operation: Any = token_pass_compiled
    if backend == "triton":
        operation = importlib.import_module("megarl.kernels.token_pass.triton_backend").token_pass_triton
    loss, _, kept, segment_sums, sums, histograms = operation(
        rule.name,
        rule.parameters,
        dampened,
        tokens.logprobs,
        tokens.rollout_logprobs,
        tokens.old_logprobs,
        tokens.advantages,
        tokens.mask,
        tokens.cu_seqlens,
        *from_sequence,
        places,
    )
    # all float outputs of an operation would carry gradient, but that of the sums is not computed
    return PassResult(loss, kept, segment_sums.detach(), sums.detach(), histograms)


def has_rule(rule: str, backend: str) -> bool:
    """Whether a fused backend (``cpp``, ``cuda``, ``triton``) knows the rule; `UserError` if it is not installed."""
    if backend == "triton":
        return rule in importlib.import_module("megarl.kernels.token_pass.triton_rules").TRITON_RULES
    return library.has_rule({"cpp": "cpu", "cuda": "cuda"}[backend], rule)
