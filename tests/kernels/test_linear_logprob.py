"""The fused lm head compared with its definition and finite differences, on one rank and split over two."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.autograd import gradcheck

from megarl.errors import UserError
from megarl.kernels import linear_logprob as fused
from megarl.kernels.linear_logprob import definition, linear_logprob
from megarl.kernels.linear_logprob import torch_backend as plain_torch

TOKENS, WIDTH, VOCAB, PADDED = 13, 6, 17, 24


def problem(
    dtype: torch.dtype = torch.float64, tokens: int = TOKENS, width: int = WIDTH, rows: int = PADDED, vocab: int = VOCAB
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, vocab, (tokens,), generator=generator)


def gradients(outputs: Any, inputs: list[torch.Tensor], uses: str = "both") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    seeds = [torch.randn(len(outputs[0]), generator=generator, dtype=torch.float64) for _ in outputs]
    chosen = [i for i, name in enumerate(("logprobs", "entropy")) if uses in (name, "both")]
    return list(
        torch.autograd.grad([outputs[i] for i in chosen], inputs, [seeds[i].to(outputs[i].dtype) for i in chosen])
    )


@pytest.mark.parametrize("chunk_tokens", [None, 1, 5, TOKENS])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("uses", ["logprobs", "entropy", "both"])
def test_equals_materialised_logits(chunk_tokens: int | None, temperature: float, uses: str) -> None:
    hidden, weight, targets = problem()
    ours = linear_logprob(hidden, weight, targets, temperature, chunk_tokens=chunk_tokens, vocab_size=VOCAB)
    wanted = definition.linear_logprob(hidden, weight, targets, temperature, VOCAB)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)
    grads = gradients(ours, [hidden, weight], uses)
    torch.testing.assert_close(grads, gradients(wanted, [hidden, weight], uses), rtol=0, atol=1e-12)
    assert not grads[1][VOCAB:].any()


def test_gradients_agree_with_finite_differences() -> None:
    hidden, weight, targets = problem()
    assert gradcheck(
        lambda h, w: linear_logprob(h, w, targets, 0.7, chunk_tokens=4, vocab_size=VOCAB), (hidden, weight)
    )


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_frozen_input_costs_no_gradient(needs: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """One matrix product for each of the three chunks: the gradient of the frozen input is not computed."""
    products: list[torch.Tensor] = []
    plain = fused._product
    monkeypatch.setattr(fused, "_product", lambda *a, **k: products.append(z := plain(*a, **k)) or z)
    hidden, weight, targets = problem()
    wanted = gradients(definition.linear_logprob(hidden, weight, targets), [hidden, weight])
    h, w = hidden.detach().requires_grad_(needs[0]), weight.detach().requires_grad_(needs[1])
    outputs = linear_logprob(h, w, targets, chunk_tokens=5)
    grads = gradients(outputs, [h if needs[0] else w])
    torch.testing.assert_close(grads[0], wanted[0 if needs[0] else 1], rtol=0, atol=1e-12)
    assert len(products) == 3
    assert {len(z) for z in products} == ({5, 3} if needs[0] else {PADDED})


def test_no_tokens_give_empty_outputs_and_a_zero_gradient() -> None:
    hidden, weight, targets = problem()
    logprobs, entropy = linear_logprob(hidden[:0], weight, targets[:0])
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad is not None and not weight.grad.any()


def test_large_logits_stay_finite_and_right() -> None:
    hidden, weight, targets = problem(torch.float32)
    outputs = linear_logprob(hidden * 300, weight, targets)
    exact = definition.linear_logprob(hidden.double() * 300, weight.double(), targets)
    torch.testing.assert_close(outputs[0].double(), exact[0], rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(outputs[1].double(), exact[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_give_float32_logits(dtype: torch.dtype) -> None:
    """Outputs are as exact as float32 arithmetic on the same rounded inputs; gradients have the inputs' dtype."""
    hidden, weight, targets = problem(dtype)
    outputs = linear_logprob(hidden, weight, targets, 0.8, chunk_tokens=4)
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    exact = definition.linear_logprob(h, w, targets, 0.8)
    for ours, wanted in zip(outputs, exact, strict=True):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=2e-6)
    for ours, wanted in zip(gradients(outputs, [hidden, weight]), gradients(exact, [h, w]), strict=True):
        assert ours.dtype is dtype
        torch.testing.assert_close(ours.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_default_chunk_fits_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    plain = plain_torch._logits
    monkeypatch.setattr(plain_torch, "_logits", lambda *a: sizes.append((z := plain(*a)).numel() * z.itemsize) or z)
    monkeypatch.setattr(plain_torch, "CPU_BUFFER_BYTES", 5 * PADDED * 4)
    hidden, weight, targets = problem(torch.float32)
    linear_logprob(hidden, weight, targets)[0].sum().backward()
    assert max(sizes) == 5 * PADDED * 4
    assert len(sizes) == 6


def test_two_numbers_per_token_are_saved_for_the_backward_pass() -> None:
    hidden, weight, targets = problem(torch.float32)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        linear_logprob(hidden, weight, targets)
    beside_the_inputs = [x for x in saved if x.data_ptr() not in (hidden.data_ptr(), weight.data_ptr())]
    floats = [x for x in beside_the_inputs if x.is_floating_point()]
    assert sum(x.numel() for x in floats) == 2 * TOKENS
    assert all(x.shape == (TOKENS,) for x in beside_the_inputs)


def test_unlikely_tokens_take_no_longer() -> None:
    """torch's exp takes a hundred times as long where its result is subnormal, such as exp(-95); its exp2 does not."""
    hidden, weight, targets = problem()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gradients(linear_logprob(hidden, weight, targets), [hidden, weight])
    called = {event.key for event in profile.key_averages()}
    assert {"aten::exp2", "aten::exp2_"} & called and not {"aten::exp", "aten::exp_"} & called


def test_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "megarl.kernels.linear_logprob.triton_backend", raising=False)
    hidden, weight, targets = problem()
    with pytest.raises(UserError, match="'triton' needs the package triton.*pip install"):
        linear_logprob(hidden, weight, targets, backend="triton")


def test_wrong_arguments_are_refused() -> None:
    hidden, weight, targets = problem(torch.float32)
    with pytest.raises(UserError, match="'cuda'; expected one of torch, triton"):
        linear_logprob(hidden, weight, targets, backend="cuda")
    with pytest.raises(UserError, match="needs a GPU, but the tensors are on cpu; use 'torch' there"):
        linear_logprob(hidden, weight, targets, backend="triton")
    with pytest.raises(ValueError, match="vocab_size is 25; expected 1 to 24"):
        linear_logprob(hidden, weight, targets, vocab_size=25)


def test_target_outside_the_vocabulary_is_nan_and_has_no_gradient() -> None:
    hidden, weight, targets = problem(torch.float32)
    targets[3], targets[5] = VOCAB, -1
    logprobs, entropy = linear_logprob(hidden, weight, targets, vocab_size=VOCAB)
    assert logprobs.isnan().nonzero().flatten().tolist() == [3, 5]
    torch.testing.assert_close(entropy, definition.linear_logprob(hidden, weight, targets * 0, 1.0, VOCAB)[1])
    (grad,) = torch.autograd.grad(logprobs.sum(), hidden)
    assert grad.isfinite().all() and grad.any(1).logical_not().nonzero().flatten().tolist() == [3, 5]


def test_a_bfloat16_weight_gradient_is_added_in_float32_unless_the_weight_is_tied() -> None:
    hidden, weight, targets = problem(torch.bfloat16)
    exact = definition.linear_logprob(hidden.double(), weight.double(), targets, 1.0, VOCAB)
    (right,) = gradients(exact, [weight])
    before = torch.randn(weight.shape)
    for tied in (False, True):
        weight.main_grad, weight.zero_out_wgrad, weight.grad_added_to_main_grad = before.clone(), tied, False
        (returned,) = gradients(linear_logprob(hidden, weight, targets, vocab_size=VOCAB), [weight])
        assert weight.grad_added_to_main_grad is not tied and returned.dtype is torch.bfloat16
        found = returned.float() if tied else weight.main_grad - before
        assert (found - right).norm() <= 0.02 * right.norm()  # log-probs of bfloat16 inputs
        assert not tied or torch.equal(weight.main_grad, before)


VOCABULARIES = (PADDED, VOCAB, 11)  # on two ranks; with 11 the second rank has nothing but padding


def _rank(rank: int, ranks: int, directory: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    result = {}
    for vocab in VOCABULARIES:
        hidden, weight, targets = problem()
        targets = targets % vocab
        shard = weight.detach().chunk(ranks)[rank].clone().requires_grad_()
        for uses in ("logprobs", "both"):
            outputs = linear_logprob(hidden, shard, targets, 0.7, group, chunk_tokens=5, vocab_size=vocab)
            result[vocab, uses] = [*(x.detach() for x in outputs), *gradients(outputs, [hidden, shard], uses)]
        targets[3] = vocab
        result[vocab] = linear_logprob(hidden, shard, targets, group=group, vocab_size=vocab)[0].detach()
    torch.save(result, f"{directory}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    directory = tmp_path_factory.mktemp("ranks")
    mp.start_processes(_rank, (2, str(directory)), nprocs=2, start_method="fork")  # type: ignore[no-untyped-call]
    return [torch.load(directory / f"{r}.pt") for r in range(2)]


@pytest.mark.parametrize("uses", ["logprobs", "both"])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_vocabulary_split_over_two_ranks(two_ranks: list[dict[Any, Any]], vocab: int, uses: str) -> None:
    hidden, weight, targets = problem()
    wanted = definition.linear_logprob(hidden, weight, targets % vocab, 0.7, vocab)
    grad_hidden, grad_weight = gradients(wanted, [hidden, weight], uses)
    first, second = (rank[vocab, uses] for rank in two_ranks)
    for outputs in (first, second):
        torch.testing.assert_close(tuple(outputs[:2]), wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(first[2] + second[2], grad_hidden, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([first[3], second[3]]), grad_weight, rtol=0, atol=1e-12)
    for rank in two_ranks:  # a target outside the vocabulary
        assert rank[vocab].isnan().nonzero().flatten().tolist() == [3]
