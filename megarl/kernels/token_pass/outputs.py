"""The arguments, outputs and gradient that all backends of the token pass share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

import torch

from megarl.kernels.constants import BINS
from megarl.kernels.tokens import Tokens

# sums over the trained tokens, explained at enum megarl_sum in csrc/include/megarl_kernels.h
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
    *(f"{flag}{sign}" for flag in ("kept", "first", "second") for sign in ("", "_positive", "_negative")),
    "bad_prefix",
    *(f"dampened_{kind}{after}" for kind in ("token", "prefix") for after in ("", "_bad")),
    "ratio_positive",
    "ratio_negative",
    "loss_positive",
)


class Arguments(NamedTuple):
    """The arguments of `megarl.kernels.token_pass.token_pass` as tensors and scalars, which a torch operator needs."""

    rule: str
    parameters: torch.Tensor
    dampened: float
    logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    old_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    mask: torch.Tensor
    cu_seqlens: torch.Tensor
    prefix_min: torch.Tensor | None
    given_value: torch.Tensor | None
    given_index: torch.Tensor | None

    @property
    def tokens(self) -> Tokens:
        return Tokens(
            self.logprobs, self.rollout_logprobs, self.advantages, self.mask, self.cu_seqlens, self.old_logprobs
        )


_TYPES = {str: "str", float: "float", torch.Tensor: "Tensor", torch.Tensor | None: "Tensor?"}
_SCHEMA = ", ".join(f"{_TYPES[kind]} {name}" for name, kind in get_type_hints(Arguments).items())


def operator(name: str) -> Callable[[Callable[[Arguments], tuple[torch.Tensor, ...]]], Any]:
    """Decorator: register a backend as ``torch.ops.megarl.<name>``, with the same signature, fake and gradient."""

    def register(function: Callable[[Arguments], tuple[torch.Tensor, ...]]) -> Any:
        registered = torch.library.custom_op(
            f"megarl::{name}",
            lambda *arguments: function(Arguments(*arguments)),
            mutates_args=(),
            device_types=("cpu", "cuda"),
            schema=f"({_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        )
        registered.register_fake(lambda *arguments: empty_outputs(Arguments(*arguments)))
        registered.register_autograd(scale_coefficient, setup_context=save_coefficient)
        return registered

    return register


def empty_outputs(a: Arguments) -> tuple[torch.Tensor, ...]:
    """New tensors for loss, coefficient, kept, segment_sums, sums, histograms; the last three are zero.

    The coefficient is the derivative of a token's loss with respect to its log-prob."""
    return (
        torch.empty_like(a.logprobs),
        torch.empty_like(a.logprobs),
        torch.empty_like(a.mask),
        a.logprobs.new_zeros(a.cu_seqlens.numel() - 1, 2, dtype=torch.float64),
        a.logprobs.new_zeros(len(SUMS), dtype=torch.float64),
        a.logprobs.new_zeros(2, BINS, dtype=torch.int64),
    )


def save_coefficient(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(output[1])
    ctx.set_materialize_grads(False)


def scale_coefficient(ctx: Any, grad_loss: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    """The gradient of every loss with respect to its own log-prob: one multiplication."""
    (coefficient,) = ctx.saved_tensors
    grad = None if grad_loss is None else grad_loss * coefficient
    return (None, None, None, grad, *([None] * 8))
