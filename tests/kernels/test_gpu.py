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
from megarl.kernels.token_pass import Inherited, PassResult, Rule, token_pass
from megarl.kernels.token_pass.language import RULES
from megarl.kernels.tokens import Tokens
from megarl.objectives import OBJECTIVES
from megarl.objectives.objective import Objective
from megarl.objectives.parts.prefix_min import exclusive_min
from tests.gpu.memory import fill_free_memory_with_nan
from tests.kernels.test_token_pass import BORDERS, inherited_values, make_batch

REQUIRED = os.environ.get("MEGARL_REQUIRE_GPU") == "1"
pytestmark = pytest.mark.skipif(not (REQUIRED or torch.cuda.is_available()), reason="needs a CUDA device")
no_kernels = not REQUIRED and library.find_library("cuda") is None
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(no_kernels, reason="the CUDA kernels are not installed"))
each_backend = pytest.mark.parametrize("backend", [CUDA, "triton"])
CASES = {
    **{name: kind() for name, kind in OBJECTIVES.items() if kind().fused},
    "dppo-kl": OBJECTIVES["dppo"](divergence="kl"),
    "m2po-released": OBJECTIVES["m2po"](variant="released"),
    **{
        f"mu_grpo-{scope}": OBJECTIVES["mu_grpo"](veto_scope=scope, veto_threshold=0.3, ratio_min=0.1, ratio_max=1.5)
        for scope in ("sequence", "suffix", "non_trigger_suffix", "trigger")
    },
}
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


def gradient(objective: Objective, batch: TokenBatch, backend: str) -> list[torch.Tensor]:
    """All results of one evaluation: loss, gradient, kept tokens, metrics and histograms."""
    terms = objective(batch, objective.statistics(batch.detach(), None, backend), backend)
    metrics = [x for pair in terms.metrics.values() for x in pair]
    grad = torch.autograd.grad(terms.loss.sum(), batch.logprobs)[0]
    return [terms.loss, grad, terms.kept, *metrics, *terms.histograms.values()]


@each_backend
@pytest.mark.parametrize("name", CASES)
def test_equals_the_definition(name: str, backend: str) -> None:
    """A token whose ratio is within a rounding error of a bound may be clipped differently: at most 1 in 10000 is."""
    batch, objective = on_device(make_batch(LENGTHS)), CASES[name]
    definition, fused = (objective(batch, objective.statistics(batch.detach(), None, b), b) for b in ("torch", backend))
    same = fused.kept == definition.kept
    assert (~same).sum() * 10000 <= same.numel()
    grads = [torch.autograd.grad(terms.loss.sum(), batch.logprobs)[0] for terms in (fused, definition)]
    torch.testing.assert_close(fused.loss[same], definition.loss[same], rtol=4e-6, atol=1e-6)
    torch.testing.assert_close(grads[0][same], grads[1][same], rtol=4e-6, atol=1e-6)
    for key, (total, count) in definition.metrics.items():
        assert float(fused.metrics[key][1]) == float(count), key
        if same.all():
            assert float(fused.metrics[key][0]) == pytest.approx(float(total), rel=1e-5, abs=1e-3), key
    for key, counts in definition.histograms.items():
        assert torch.equal(fused.histograms[key], counts), key


@each_backend
@pytest.mark.parametrize("name", RULES)
def test_inherited_values_act_as_in_cpp(name: str, backend: str) -> None:
    """What chunks of a context-parallel rank inherit from the rest of their sequence has the same effect as in C++."""
    batch = make_batch([5, 900, 0, 8, 40])
    inherited = inherited_values()
    values = (0.5, 2.0**43) if name == "second_moment" else (0.6, 1.4, 1.2, 0.9)

    def run(batch: TokenBatch, inherited: Inherited, backend: str) -> PassResult:
        device = batch.loss_mask.device
        places = torch.arange(5, device=device) << 22
        return token_pass(Rule(RULES[name], values), Tokens.of(batch), inherited, places, backend)

    ours = run(on_device(batch), Inherited(*(x.cuda() for x in vars(inherited).values())), backend)
    theirs = run(batch, inherited, "cpp")
    assert torch.equal(ours.kept.cpu(), theirs.kept)
    assert torch.equal(ours.histograms.cpu(), theirs.histograms)
    torch.testing.assert_close(ours.loss.cpu(), theirs.loss, rtol=4e-6, atol=1e-6)
    torch.testing.assert_close(ours.sums.cpu(), theirs.sums, rtol=1e-5, atol=1e-3)


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


def test_prefix_minimum_equals_that_of_the_cpu() -> None:
    g = torch.Generator().manual_seed(0)
    lengths = [0, 1, 1023, 1024, 1025, 5000]
    log_ratio = torch.randn(sum(lengths), generator=g).cumsum(0)
    log_ratio[3000] = torch.nan
    mask = torch.rand(sum(lengths), generator=g) < 0.8
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    out = exclusive_min(log_ratio.cuda(), mask.cuda(), cu_seqlens.cuda())
    torch.testing.assert_close(out.cpu(), exclusive_min(log_ratio, mask, cu_seqlens), rtol=0, atol=0, equal_nan=True)
