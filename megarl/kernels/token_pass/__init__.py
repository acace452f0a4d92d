"""One pass over packed tokens: log-ratio, running prefix minimum, weight and mask, loss, gradient and metric sums.

What a token's loss is depends on the rule; ``csrc/include/token_rules.h`` holds one small
function for each, `triton_rules` the same for Triton. The readable definition is the objective itself
(`megarl.objectives`, backend ``torch``).
"""

from __future__ import annotations

import ctypes
import importlib
from dataclasses import dataclass, field
from typing import Any

import torch

from megarl.kernels import library
from megarl.kernels.tokens import Tokens, check_backend

# numbers and order of csrc/include/megarl_kernels.h
RULES = (
    "reinforce",
    "clip_token",
    "clip_prefix",
    "clip_sequence_mean",
    "clip_dual",
    "soft_clip_token",
    "soft_clip_prefix",
    "tapered_sequence",
    "veto_sequence",
    "veto_suffix",
    "veto_non_trigger_suffix",
    "veto_trigger",
    "second_moment",
    "decoupled",
    "clip_log_ratio",
)
SUMS = (
    "tokens",
    "positive",
    "negative",
    "ratio",
    "ratio_square",
    "chi2",
    "log_ratio",
    "k3",
    "square",
    "trust",
    "trust_square",
    "trust_kept",
    "trust_kept_square",
    "clamped",
    "kept",
    "kept_positive",
    "kept_negative",
    "first",
    "first_positive",
    "first_negative",
    "second",
    "second_positive",
    "second_negative",
    "bad_prefix",
    "dampened_token",
    "dampened_token_bad",
    "dampened_prefix",
    "dampened_prefix_bad",
)
BINS_PER_SIGN = 293  # log-ratio histogram: 16 bins to an octave of |l| from 2^-14 to 20, and one around 0
BINS = 2 * BINS_PER_SIGN + 1


@dataclass(frozen=True)
class Rule:
    """What the pass does with a token, and what to call the two flags that the rule counts."""

    name: str  # one of RULES
    parameters: torch.Tensor  # [P] float64 on the device of the tokens
    first: str | None = None
    second: str | None = None
    scalars: dict[str, torch.Tensor] = field(default_factory=dict)  # metrics that are the same for every token


@dataclass(frozen=True)
class Inherited:
    """What each segment takes over from the rest of its sequence; for segments that are no whole sequences."""

    prefix_min: torch.Tensor  # [segments] float32, least log-ratio of the earlier segments, inf for none
    log_ratio: torch.Tensor  # [segments] float32, mean or sum over the whole sequence, as the rule wants it
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
    places: torch.Tensor | None = None,  # [segments] int64 for "second_moment": order of each segment's first token
    backend: str = "cpp",
) -> PassResult:
    """Forward and gradient at once; `UserError` if `backend` is not installed. No host sync.

    Results do not depend on the number of threads. The torch backend is the objective itself.
    """
    check_backend(backend, tokens.logprobs.device)
    carried = (None, None, None) if inherited is None else tuple(vars(inherited).values())
    operation: Any = _token_pass
    if backend == "triton":
        operation = importlib.import_module("megarl.kernels.token_pass.triton_backend").token_pass_triton
    loss, _, kept, segment_sums, sums, histograms = operation(
        RULES.index(rule.name),
        rule.parameters,
        tokens.logprobs,
        tokens.rollout_logprobs,
        tokens.old_logprobs,
        tokens.advantages,
        tokens.mask,
        tokens.cu_seqlens,
        *carried,
        places,
    )
    # an operation's float outputs all carry gradient; that of the sums would be nothing
    return PassResult(loss, kept, segment_sums.detach(), sums.detach(), histograms)


def empty_outputs(logprobs: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """loss, coefficient, kept, segment_sums, sums, histograms, the last three zero."""
    return (
        torch.empty_like(logprobs),
        torch.empty_like(logprobs),
        torch.empty_like(mask),
        logprobs.new_zeros(cu_seqlens.numel() - 1, 2, dtype=torch.float64),
        logprobs.new_zeros(len(SUMS), dtype=torch.float64),
        logprobs.new_zeros(2, BINS, dtype=torch.int64),
    )


@torch.library.custom_op("megarl::token_pass", mutates_args=(), device_types=("cpu", "cuda"))
def _token_pass(
    rule: int,
    parameters: torch.Tensor,
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor | None,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    cu_seqlens: torch.Tensor,
    prefix_min: torch.Tensor | None,
    log_ratio: torch.Tensor | None,
    first_trigger: torch.Tensor | None,
    places: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = Tokens(logprobs, rollout_logprobs, advantages, mask, cu_seqlens, old_logprobs)
    device = logprobs.device
    if device.type == "cpu" and int(cu_seqlens[-1]) != logprobs.numel():
        raise ValueError(f"cu_seqlens ends at {int(cu_seqlens[-1])}, but there are {logprobs.numel()} tokens")
    outputs = empty_outputs(logprobs, mask, cu_seqlens)
    inherited = None
    if prefix_min is not None:
        inherited = library.InheritedPointers(*(t.data_ptr() for t in (prefix_min, log_ratio, first_trigger)))  # type: ignore[union-attr]
    scratch = (logprobs.new_empty(tokens.segments, len(SUMS), dtype=torch.float64),) if device.type == "cuda" else ()
    rule_number = ctypes.c_int(rule)
    library.call(
        "token_pass", device, rule_number, parameters, tokens.pointers(), inherited, places, *outputs, *scratch
    )
    return outputs  # type: ignore[return-value]


@_token_pass.register_fake
def fake_outputs(*arguments: Any) -> tuple[torch.Tensor, ...]:
    return empty_outputs(arguments[2], arguments[6], arguments[7])


def save_coefficient(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(output[1])
    ctx.set_materialize_grads(False)


def scale_coefficient(ctx: Any, grad_loss: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    """The gradient of every loss with respect to its own log-prob: one multiplication."""
    (coefficient,) = ctx.saved_tensors
    grad = None if grad_loss is None else grad_loss * coefficient
    return (None, None, grad, *([None] * 9))


_token_pass.register_autograd(scale_coefficient, setup_context=save_coefficient)
