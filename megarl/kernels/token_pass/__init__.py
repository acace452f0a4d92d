"""One pass over packed tokens: log-ratio, running prefix minimum, weight and mask, loss, gradient and metric sums.

A rule is the small function that computes what a token contributes under an objective (`language`). It stands in the
objective's file.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field
from typing import Any

import torch

from megarl.errors import UserError
from megarl.kernels import library
from megarl.kernels.constants import BAD_PREFIX
from megarl.kernels.token_pass.compiled import token_pass_compiled
from megarl.kernels.token_pass.language import RuleFunction
from megarl.kernels.tokens import Tokens, check_backend


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
    sums: torch.Tensor  # [len(SUMS)] float64, see `megarl.kernels.token_pass.outputs`
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
    operation: Any = token_pass_compiled
    if backend == "triton":
        operation = importlib.import_module("megarl.kernels.token_pass.triton_backend").token_pass_triton
    loss, _, kept, segment_sums, sums, histograms = operation(
        rule.function.name,
        rule.on(tokens.logprobs.device),
        dampened,
        tokens.logprobs,
        tokens.rollout_logprobs,
        tokens.old_logprobs,
        tokens.advantages,
        tokens.mask,
        tokens.cu_seqlens,
        given.prefix_min,
        given.value,
        given.index,
    )
    # autograd marks all float outputs of the operation, but the operation has no gradient for the sums
    return PassResult(loss, kept, segment_sums.detach(), sums.detach(), histograms)


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
