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

TEMPERATURE = 0.7


def problem(
    tokens: int, width: int, rows: int, vocab: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (tokens,), generator=generator)


def gradients(outputs: Any, inputs: list[torch.Tensor], uses: str = "both") -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    seeds = [torch.randn(len(outputs[0]), generator=generator, dtype=torch.float64) for _ in outputs]
    chosen = [i for i, name in enumerate(("logprobs", "entropy")) if uses in (name, "both")]
    return torch.autograd.grad([outputs[i] for i in chosen], inputs, [seeds[i].to(outputs[i].dtype) for i in chosen])


def exact(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab: int, uses: str
) -> tuple[list[torch.Tensor], tuple[torch.Tensor, ...], float]:
    """Outputs and gradients in float64 of the same rounded inputs, and the largest logit, with which errors grow."""
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    outputs = definition.linear_logprob(h, w, targets, TEMPERATURE, vocab)
    largest = (h @ w.t()).abs().max().item() / TEMPERATURE if len(h) else 0.0
    return [x.detach() for x in outputs], gradients(outputs, [h, w], uses), largest


def check(
    outputs: Any, grads: tuple[torch.Tensor, ...], wanted: Any, wanted_grads: tuple[torch.Tensor, ...], largest: float
) -> None:
    """Outputs must be right to a few roundings of the largest logit, gradients also to one rounding to their dtype."""
    single = torch.finfo(torch.float32).eps
    for ours, right in zip(outputs, wanted, strict=True):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours.double(), right, rtol=0, atol=4 * single * max(largest, 1))
    for ours, right in zip(grads, wanted_grads, strict=True):
        scale = right.abs().max().item() if right.numel() else 0.0
        own = torch.finfo(ours.dtype).eps / 2 if ours.dtype is torch.float16 else 0.0
        torch.testing.assert_close(ours.double(), right, rtol=own, atol=(4 * single * max(largest, 1) + own**2) * scale)


CASES = [
    (torch.float32, 1, 6, 17, 17),
    (torch.float32, 63, 16, 64, 64),
    (torch.float32, 64, 20, 65, 61),
    (torch.float32, 65, 33, 131, 127),
    (torch.float32, 300, 9, 191, 191),
    (torch.float16, 1, 8, 1, 1),
    (torch.float16, 127, 64, 255, 255),
    (torch.float16, 128, 65, 257, 256),
    (torch.float16, 129, 130, 521, 509),
]


@pytest.mark.parametrize("architecture", [90, 80])
@pytest.mark.parametrize(("dtype", "tokens", "width", "rows", "vocab"), CASES)
def test_equals_the_definition(
    dtype: torch.dtype, tokens: int, width: int, rows: int, vocab: int, architecture: int, monkeypatch: Any
) -> None:
    """Sizes near multiples of a tile's, some with padded rows; sm_90 loads by descriptors, sm_80 by pointers."""
    monkeypatch.setattr(kernels, "_architecture", lambda x: architecture)
    hidden, weight, targets = problem(tokens, width, rows, vocab, dtype)
    outputs = linear_logprob(hidden, weight, targets, TEMPERATURE, vocab_size=vocab, backend="triton")
    grads = gradients(outputs, [hidden, weight])
    check(outputs, grads, *exact(hidden, weight, targets, vocab, "both"))
    assert not grads[1][vocab:].any()


@pytest.mark.parametrize("uses", ["logprobs", "entropy"])
def test_gradient_of_one_output_alone(uses: str) -> None:
    hidden, weight, targets = problem(70, 12, 90, 83, torch.float32)
    outputs = linear_logprob(hidden, weight, targets, TEMPERATURE, vocab_size=83, backend="triton")
    check(outputs, gradients(outputs, [hidden, weight], uses), *exact(hidden, weight, targets, 83, uses))


def test_groups_of_token_blocks_and_splits_of_the_vocabulary(monkeypatch: Any) -> None:
    """Several groups of token blocks, the last of them not full, and tiles that do not divide evenly into splits."""
    monkeypatch.setattr(kernels, "GROUP", 2)
    hidden, weight, targets = problem(4 * 128 + 30, 8, 9 * 256 + 3, 9 * 256 + 3, torch.float16)
    outputs = linear_logprob(hidden, weight, targets, TEMPERATURE, backend="triton")
    check(outputs, gradients(outputs, [hidden, weight]), *exact(hidden, weight, targets, len(weight), "both"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_backward_pass_in_chunks(dtype: torch.dtype) -> None:
    """Three chunks, of which the last is shorter."""
    hidden, weight, targets = problem(300, 10, 70, 70, dtype)
    outputs = linear_logprob(hidden, weight, targets, TEMPERATURE, chunk_tokens=128, backend="triton")
    check(outputs, gradients(outputs, [hidden, weight]), *exact(hidden, weight, targets, 70, "both"))


def test_takes_strided_hidden_states() -> None:
    hidden, weight, targets = problem(66, 14, 40, 40, torch.float32)
    strided = hidden.detach().repeat_interleave(2, 0)[::2].requires_grad_()
    outputs = linear_logprob(strided, weight, targets, TEMPERATURE, backend="triton")
    check(outputs, gradients(outputs, [strided, weight]), *exact(hidden, weight, targets, 40, "both"))


def test_misaligned_weight_gives_the_same_bits() -> None:
    hidden, weight, targets = problem(66, 8, 40, 40, torch.float32)
    late = torch.cat([weight.new_zeros(1), weight.detach().flatten()])[1:].view_as(weight)
    assert late.data_ptr() % 16
    ours = linear_logprob(hidden, late, targets, backend="triton")
    torch.testing.assert_close(ours, linear_logprob(hidden, weight, targets, backend="triton"), rtol=0, atol=0)


def test_results_repeat_bit_for_bit() -> None:
    hidden, weight, targets = problem(130, 16, 300, 300, torch.float16)

    def results() -> list[torch.Tensor]:
        outputs = linear_logprob(hidden, weight, targets, TEMPERATURE, backend="triton")
        return [*outputs, *gradients(outputs, [hidden, weight])]

    assert all(torch.equal(a, b) for a, b in zip(results(), results(), strict=True))


def test_large_logits_stay_finite_and_right() -> None:
    """Logits may be far below 0: the padded rows of the vocabulary must not count as logits of 0."""
    hidden, weight, targets = problem(65, 8, 70, 67, torch.float32)
    outputs = linear_logprob(hidden * -1000, weight.abs(), targets, vocab_size=67, backend="triton")
    wanted = definition.linear_logprob(hidden.double() * -1000, weight.double().abs(), targets, 1.0, 67)
    torch.testing.assert_close(outputs[0].double(), wanted[0], rtol=1e-6, atol=1e-2)
    torch.testing.assert_close(outputs[1].double(), wanted[1], rtol=0, atol=1e-2)


def test_float64_is_refused() -> None:
    hidden, weight, targets = problem(4, 8, 20, 20, torch.float64)
    with pytest.raises(UserError, match='"triton" got torch.float64, .* "torch"'):
        linear_logprob(hidden, weight, targets, backend="triton")
