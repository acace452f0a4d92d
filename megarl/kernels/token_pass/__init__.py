"""One pass over packed tokens: log-ratio, running prefix minimum, weight and mask, loss, gradient and metric sums.

A rule is the small function that computes what a token contributes under an objective (`language`). It stands in the
objective's file.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megarl.errors import UserError
from megarl.kernels import library
from megarl.kernels.constants import BAD_PREFIX, BINS
from megarl.kernels.token_pass.language import RuleFunction
from megarl.kernels.tokens import Tokens, check_backend

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


@dataclass(frozen=True)
class Rule:
    """The function that the pass applies to each token, with its parameters.

    first, second: names of the metrics that count the tokens for which the function sets its first or second flag.
    """

    function: RuleFunction
    parameters: tuple[float | torch.Tensor, ...] = ()  # tensors are 0-d, on the device of the tokens
    first: str | None = None
    second: str | None = None
    scalars: dict[str, torch.Tensor] = field(default_factory=dict)  # metrics that are the same for every token

    def on(self, device: torch.device) -> torch.Tensor:
        """The parameters, [P] float64."""
        if not any(isinstance(p, torch.Tensor) for p in self.parameters):
            return _constants(self.parameters or (0.0,), device)
        tensors = (p if isinstance(p, torch.Tensor) else _constants((p,), device)[0] for p in self.parameters)
        return torch.stack([p.double() for p in tensors])


@functools.lru_cache(maxsize=64)
def _constants(values: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    """Cached, since a copy to a GPU in every call would be a host sync."""
    return torch.tensor(values, dtype=torch.float64, device=device)


@dataclass(frozen=True)
class Given:
    """What the pass is told of the sequence of each segment; None: it computes it, or the rule needs none."""

    prefix_min: torch.Tensor | None = None  # [segments] float32, least log-ratio of earlier segments, inf for none
    value: torch.Tensor | None = None  # [segments] float32, see `Sequence`
    index: torch.Tensor | None = None  # [segments] int32, counted from the segment's start


@dataclass(frozen=True)
class PassResult:
    loss: torch.Tensor  # [T] float32, carries gradient to the log-probs
    kept: torch.Tensor  # [T] bool, trained tokens whose gradient survives
    segment_sums: torch.Tensor  # [segments, 2] float64: number of trained tokens, sum of their loss
    sums: torch.Tensor  # [len(SUMS)] float64, see `SUMS`
    histograms: torch.Tensor  # [2, BINS] int64: of the log-ratio, of the prefix minimum


def token_pass(
    rule: Rule,
    tokens: Tokens,
    given: Given = Given(),  # without prefix_min, segments are whole sequences
    backend: str = "cpp",
    dampened: float = BAD_PREFIX,  # effective ratio below which a token counts as dampened
) -> PassResult:
    """Loss, gradient and metric sums of a fused backend (``cpp``, ``cuda`` or ``triton``). No host sync.

    Results do not depend on the number of threads. `UserError` if the backend is not installed.
    """
    check_backend(backend, tokens.logprobs.device)
    return PassResult(*_TokenPass.apply(tokens.logprobs, rule, tokens, given, backend, float(dampened)))


class _TokenPass(torch.autograd.Function):
    """The fields of `PassResult`. The gradient of every loss with respect to its own log-prob: one multiplication."""

    @staticmethod
    def forward(
        ctx: Any, logprobs: torch.Tensor, rule: Rule, tokens: Tokens, given: Given, backend: str, dampened: float
    ) -> tuple[torch.Tensor, ...]:
        device, length = logprobs.device, logprobs.numel()
        if device.type == "cpu" and (end := tokens.cu_seqlens.numpy()[-1]) != length:  # a GPU's values are not read
            raise ValueError(f"cu_seqlens ends at {end}, but there are {length} tokens")
        # of each token its loss and the derivative of that with respect to its log-prob
        loss, coefficient, kept = torch.empty_like(logprobs), torch.empty_like(logprobs), torch.empty_like(tokens.mask)
        segment_sums = logprobs.new_zeros(tokens.segments, 2, dtype=torch.float64)
        sums = logprobs.new_zeros(len(SUMS), dtype=torch.float64)
        histograms = logprobs.new_zeros(2, BINS, dtype=torch.int64)
        parameters, values = rule.on(device), (given.prefix_min, given.value, given.index)
        outputs = [loss, coefficient, kept, segment_sums, sums, histograms]
        if backend == "triton":
            from megarl.kernels.token_pass import triton_backend

            triton_backend.launch(rule.function, parameters, dampened, tokens, values, *outputs)
        else:
            if device.type == "cuda":  # memory that the kernels use
                outputs.append(logprobs.new_empty(tokens.segments, len(SUMS), dtype=torch.float64))
            arguments = (rule.function.name, parameters, dampened, tokens.pointers(), *values, *outputs)
            library.call("token_pass", device, *arguments)
        ctx.save_for_backward(coefficient)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(kept, segment_sums, sums, histograms)
        return loss, kept, segment_sums, sums, histograms

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
        (coefficient,) = ctx.saved_tensors
        return grad_loss * coefficient, None, None, None, None, None


def has_rule(function: RuleFunction, backend: str) -> bool:
    """Whether a fused backend has the rule: none those with a quantity per token, Triton all others, ``cpp`` and
    ``cuda`` those that megarl was built with. `UserError` if it is not installed, or was built before the rule's file
    was changed."""
    if function.per_token:
        return False
    if backend == "triton":
        return True
    built = library.rule_digest({"cpp": "cpu", "cuda": "cuda"}[backend], function.name)
    if built is not None and built != function.digest:
        raise UserError(
            f"{function.file} was changed after the {backend} kernels had been built from it: build megarl again "
            "(pip install ., or make in a clone)"
        )
    return built is not None
