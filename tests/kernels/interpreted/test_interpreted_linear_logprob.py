"""The Triton backend of the fused lm head, in Triton's interpreter, against the definition in float64.

The interpreter is silently wrong in bfloat16, so these tests use float32 (tiles of 64 x 64) and float16 (128 x 256, and
128 x 128 on sm_80).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.errors import UserError
from megarl.kernels.linear_logprob import definition, linear_logprob
from megarl.kernels.linear_logprob import triton_backend as kernels
from tests.kernels.test_linear_logprob import gradients, problem

TEMPERATURE = 0.7


def compare(inputs: Any, vocab: int, uses: str = "both", strides: int = 1, **options: Any) -> list[torch.Tensor]:
    """Outputs must be right to a few roundings of the largest logit, with which errors grow; gradients also to one
    rounding to their dtype. Returns the gradients."""
    hidden, weight, targets = inputs
    strided = hidden.detach().repeat_interleave(strides, 0)[::strides].requires_grad_()
    outputs = linear_logprob(strided, weight, targets, TEMPERATURE, vocab_size=vocab, backend="triton", **options)
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    wanted = definition.linear_logprob(h, w, targets, TEMPERATURE, vocab)
    largest = max((h @ w.t()).abs().max().item() / TEMPERATURE, 1)
    single = torch.finfo(torch.float32).eps
    for ours, right in zip(outputs, wanted, strict=True):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours.double(), right, rtol=0, atol=4 * single * largest)
    grads = gradients(outputs, [strided, weight], uses)
    for ours, right in zip(grads, gradients(wanted, [h, w], uses), strict=True):
        own = torch.finfo(ours.dtype).eps / 2 if ours.dtype is torch.float16 else 0.0
        limit = (4 * single * largest + own**2) * right.abs().max().item()
        torch.testing.assert_close(ours.double(), right, rtol=own, atol=limit)
    return grads


CASES = [
    (torch.float32, 1, 6, 17, 17),
    (torch.float32, 63, 16, 64, 64),
    (torch.float32, 64, 20, 65, 61),
    (torch.float32, 65, 33, 131, 127),
    (torch.float32, 300, 9, 191, 191),
    (torch.float16, 1, 8, 1, 1),
    (torch.float16, 127, 64, 255, 255),
    (torch.float16, 129, 130, 521, 509),
]


@pytest.mark.parametrize("architecture", [90, 80])
@pytest.mark.parametrize(("dtype", "tokens", "width", "rows", "vocab"), CASES)
def test_equals_the_definition(
    dtype: torch.dtype, tokens: int, width: int, rows: int, vocab: int, architecture: int, monkeypatch: Any
) -> None:
    """Sizes near multiples of a tile's, some with padded rows; sm_90 loads by descriptors, sm_80 by pointers."""
    monkeypatch.setattr(kernels, "_architecture", lambda x: architecture)
    grads = compare(problem(dtype, tokens, width, rows, vocab), vocab)
    assert not grads[1][vocab:].any()


@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    [
        ((70, 12, 90, 83), torch.float32, {"uses": "logprobs"}),
        ((70, 12, 90, 83), torch.float32, {"uses": "entropy"}),
        # three chunks of the backward pass, of which the last is shorter
        ((300, 10, 70, 70), torch.float32, {"chunk_tokens": 128}),
        ((300, 10, 70, 70), torch.float16, {"chunk_tokens": 128}),
        ((66, 14, 40, 40), torch.float32, {"strides": 2}),
    ],
)
def test_one_output_chunks_and_strides(shape: Any, dtype: torch.dtype, options: Any) -> None:
    compare(problem(dtype, *shape), shape[-1], **options)


def test_groups_of_token_blocks_and_splits_of_the_vocabulary(monkeypatch: Any) -> None:
    """Several groups of token blocks, the last of them not full, and tiles that do not divide evenly into splits."""
    monkeypatch.setattr(kernels, "GROUP", 2)
    vocab = 9 * 256 + 3
    compare(problem(torch.float16, 4 * 128 + 30, 8, vocab, vocab), vocab)


def test_misaligned_weight_gives_the_same_bits() -> None:
    hidden, weight, targets = problem(torch.float32, 66, 8, 40, 40)
    late = torch.cat([weight.new_zeros(1), weight.detach().flatten()])[1:].view_as(weight)
    assert late.data_ptr() % 16
    ours = linear_logprob(hidden, late, targets, backend="triton")
    torch.testing.assert_close(ours, linear_logprob(hidden, weight, targets, backend="triton"), rtol=0, atol=0)


def test_large_logits_stay_finite_and_right() -> None:
    """Logits may be far below 0: the padded rows of the vocabulary must not count as logits of 0."""
    hidden, weight, targets = problem(torch.float32, 65, 8, 70, 67)
    outputs = linear_logprob(hidden * -1000, weight.abs(), targets, vocab_size=67, backend="triton")
    wanted = definition.linear_logprob(hidden.double() * -1000, weight.double().abs(), targets, 1.0, 67)
    torch.testing.assert_close(outputs[0].double(), wanted[0], rtol=1e-6, atol=1e-2)
    torch.testing.assert_close(outputs[1].double(), wanted[1], rtol=0, atol=1e-2)


def test_float64_is_refused() -> None:
    hidden, weight, targets = problem(torch.float64, 4, 8, 20, 20)
    with pytest.raises(UserError, match='"triton" got torch.float64, .* "torch"'):
        linear_logprob(hidden, weight, targets, backend="triton")
