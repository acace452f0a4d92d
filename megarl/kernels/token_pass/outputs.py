"""What every backend of the token pass returns, and its gradient."""

from __future__ import annotations

from typing import Any

import torch

from megarl.kernels.constants import BINS

# over the trained tokens, as enum megarl_sum of csrc/include/megarl_kernels.h explains
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


def fake_outputs(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Outputs without values, for tracing."""
    return empty_outputs(arguments[2], arguments[6], arguments[7])


def save_coefficient(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(output[1])
    ctx.set_materialize_grads(False)


def scale_coefficient(ctx: Any, grad_loss: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    """The gradient of every loss with respect to its own log-prob: one multiplication."""
    (coefficient,) = ctx.saved_tensors
    grad = None if grad_loss is None else grad_loss * coefficient
    return (None, None, grad, *([None] * 9))
