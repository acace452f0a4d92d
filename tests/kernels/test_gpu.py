"""The CUDA and Triton backends on a GPU: same values as the definitions, same bits each time, no waits.

Without a GPU, or without the CUDA kernels, these tests are skipped; with MEGARL_REQUIRE_GPU=1 they fail instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

import pytest
import torch

from megarl.batch import TokenBatch
from megarl.kernels import library
from megarl.kernels.linear_logprob import definition, linear_logprob
from megarl.kernels.token_pass import Rule
from megarl.kernels.token_pass.language import RULES
from tests.gpu.memory import fill_free_memory_with_nan
from tests.kernels.test_token_pass import BORDERS, as_in_cpp, compare, given_values, gradient, make_batch
from tests.objectives.test_against_papers import CASES as PAPERS

REQUIRED = os.environ.get("MEGARL_REQUIRE_GPU") == "1"
pytestmark = pytest.mark.skipif(not (REQUIRED or torch.cuda.is_available()), reason="needs a CUDA device")
no_kernels = not REQUIRED and library.find_library("cuda") is None
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(no_kernels, reason="the CUDA kernels are not installed"))
each_backend = pytest.mark.parametrize("backend", [CUDA, "triton"])
CASES = {name: objective for name, (objective, _) in PAPERS.items() if objective.fused}
# segments with a thread block each, and groups of short ones that share a block
LENGTHS = [*BORDERS, 31, 512, 513, 0, 8, 8, 8, 8, 8, 8, 8, 8]


def on_device(batch: TokenBatch) -> TokenBatch:
    moved = {f.name: getattr(batch, f.name) for f in fields(batch)}
    moved = {name: x.detach().cuda() if isinstance(x, torch.Tensor) else x for name, x in moved.items()}
    moved["logprobs"].requires_grad_()
    return replace(batch, **moved)


@pytest.fixture(autouse=True)
def free_memory_holds_nan() -> None:
    """So that what a kernel leaves unwritten, or reads beside its input, shows."""
    fill_free_memory_with_nan()


@contextmanager
def no_wait() -> Iterator[None]:
    """Within this context a wait of the host for the device raises an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_backend
@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name: str, backend: str) -> None:
    """A token whose ratio is within a rounding error of a bound may be clipped differently: at most 1 in 10000 is."""
    batch = on_device(make_batch(LENGTHS))
    compare(CASES[name], batch, backend, moved=batch.logprobs.numel() // 10_000, atol=1e-3)


@each_backend
@pytest.mark.parametrize("name", RULES)
def test_given_values_act_as_in_cpp(name: str, backend: str) -> None:
    """What chunks of a context-parallel rank are told of the rest of their sequence has the same effect as in C++."""
    batch = make_batch([5, 900, 0, 8, 40])
    values = (0.5, 2.0**43) if name == "second_moment" else (0.6, 1.4, 1.2, 0.9)
    as_in_cpp(Rule(RULES[name], values), batch, backend, given_values(), device="cuda", atol=1e-3)


@each_backend
@pytest.mark.parametrize("name", CASES)
def test_results_repeat_bit_for_bit_without_a_wait(name: str, backend: str) -> None:
    batch, objective = on_device(make_batch(LENGTHS)), CASES[name]
    first = gradient(objective, batch, backend)  # compiles, and makes the constants
    with no_wait():
        second = gradient(objective, batch, backend)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lm_head_equals_the_definition_without_a_wait(dtype: torch.dtype) -> None:
    """Log-probs and entropy are exact to the rounding of float32 logits, gradients to that of their own dtype."""
    g = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(300, 256, generator=g, device="cuda").to(dtype).requires_grad_()
    weight = (torch.randn(5003, 256, generator=g, device="cuda") / 16).to(dtype).requires_grad_()
    targets = torch.randint(0, 5000, (300,), generator=g, device="cuda")

    def run() -> list[torch.Tensor]:
        outputs = linear_logprob(hidden, weight, targets, 0.7, vocab_size=5000, backend="triton")
        return [*outputs, *torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), (hidden, weight))]

    first = run()
    with no_wait():
        second = run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    outputs = definition.linear_logprob(h, w, targets, 0.7, 5000)
    exact = [*outputs, *torch.autograd.grad(outputs[0].sum() + outputs[1].sum(), (h, w))]
    for ours, right in zip(first[:2], exact[:2], strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=0, atol=2e-5)
    for ours, right in zip(first[2:], exact[2:], strict=True):
        step = torch.finfo(dtype).eps if dtype is not torch.float32 else 1e-5
        torch.testing.assert_close(ours.double(), right, rtol=step, atol=2 * step * right.abs().max().item())
