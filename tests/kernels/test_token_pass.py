"""The compiled token pass; its values are tested against the papers in tests/objectives, its
segments under context parallelism in tests/distributed."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.batch import TokenBatch
from megarl.errors import UserError
from megarl.kernels import library
from megarl.kernels.constants import NEVER
from megarl.kernels.token_pass import Given, PassResult, Rule, token_pass
from megarl.kernels.token_pass.language import RULES, RuleFunction
from megarl.kernels.tokens import Tokens
from megarl.objectives import OBJECTIVES, Objective, build_objective
from tests.helpers import ROOT
from tests.objectives.random_batches import VARIANTS


def make_batch(lengths: list[int], seed: int = 0) -> TokenBatch:
    g = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    logprobs = -torch.rand(tokens, generator=g) * 3
    rollout = (logprobs - 0.4 * torch.randn(tokens, generator=g)).clamp(max=0)
    advantages = torch.randn(len(lengths), generator=g).repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    mask = torch.rand(tokens, generator=g) < 0.8
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    old = rollout + 0.1 * torch.randn(tokens, generator=g)
    return TokenBatch(logprobs.requires_grad_(), rollout, advantages, mask, cu_seqlens, old_logprobs=old)


NOTHING = Given()


def given_values() -> Given:
    """What five chunks of a context-parallel rank may be told of the rest of their sequence."""
    g = torch.Generator().manual_seed(1)
    return Given(
        torch.where(torch.rand(5, generator=g) < 0.4, torch.inf, -torch.rand(5, generator=g)),
        torch.randn(5, generator=g),
        torch.tensor([2, -3, 0, NEVER, 7], dtype=torch.int32),
    )


def to_device(fields: Any, device: str) -> Any:
    return type(fields)(*(None if x is None else x.to(device) for x in vars(fields).values()))


def as_in_cpp(
    rule: Rule,
    batch: TokenBatch,
    backend: str,
    given: Given = NOTHING,
    device: str = "cpu",
    atol: float = 1e-5,
) -> PassResult:
    """The result of a backend, which is that of the C++ pass."""
    inputs = (Tokens.of(batch.detach()), given)
    theirs = token_pass(rule, *inputs, "cpp")
    ours = to_device(token_pass(rule, *(to_device(x, device) for x in inputs), backend), "cpu")
    assert torch.equal(ours.kept, theirs.kept) and torch.equal(ours.histograms, theirs.histograms)
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=4e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(ours.segment_sums, theirs.segment_sums, rtol=1e-5, atol=atol, equal_nan=True)
    torch.testing.assert_close(ours.sums, theirs.sums, rtol=1e-5, atol=atol, equal_nan=True)
    return ours


FUSED = [name for name, kind in OBJECTIVES.items() if kind().fused]
BORDERS = [255, 256, 257, 0, 0, 1, 511, 1, 0, 513, 16383, 1, 16385, 3, 40000, 0]


def compare(
    objective: Objective,
    batch: TokenBatch,
    backend: str,
    where: str = "",
    rtol: float = 4e-6,
    atol: float = 2e-6,
    moved: int = 0,
) -> None:
    """Kept tokens, counts and histograms equal those of the definition, all else to a few roundings of float32.

    atol: of the sums over all tokens. moved: how many tokens only one of the two may keep.
    """
    fused, definition = (objective(batch, objective.statistics(batch.detach(), None, b), b) for b in (backend, "torch"))
    same = fused.kept == definition.kept
    assert (~same).sum() <= moved, where
    gradients = [torch.autograd.grad(terms.loss.sum(), batch.logprobs)[0] for terms in (fused, definition)]
    for ours, right in ((fused.loss, definition.loss), gradients):
        torch.testing.assert_close(ours[same], right[same], rtol=rtol, atol=1e-6, msg=lambda m: f"{where}: {m}")
    assert fused.metrics.keys() == definition.metrics.keys()
    for key, (total, count) in definition.metrics.items():
        ours, our_count = (float(x) for x in fused.metrics[key])
        assert our_count == float(count), (where, key)
        assert not same.all() or ours == pytest.approx(float(total), rel=1e-5, abs=atol), (where, key)
    for key, counts in definition.histograms.items():
        assert torch.equal(fused.histograms[key], counts), (where, key)


@pytest.mark.parametrize("name", ["mu_grpo", "gspo", "minpro", "m2po", "topr"])
def test_responses_across_tiles_and_blocks(name: str) -> None:
    """Lengths near that of a tile (256) and of a block (16384), and empty responses."""
    compare(OBJECTIVES[name](), make_batch(BORDERS), "cpp", rtol=2e-6, atol=1e-4)


def gradient(objective: Objective, batch: TokenBatch, backend: str) -> list[torch.Tensor]:
    """All results of one evaluation: statistics, loss, gradient, kept tokens, metrics and histograms."""
    statistics = objective.statistics(batch.detach(), None, backend)
    terms = objective(batch, statistics, backend)
    metrics = [x for pair in terms.metrics.values() for x in pair]
    grad = torch.autograd.grad(terms.loss.sum(), batch.logprobs)[0]
    return [*(statistics or ()), terms.loss, grad, terms.kept, *metrics, *terms.histograms.values()]


def digest(threads: int) -> str:
    """Checksum of everything that the fused objectives compute with this number of OpenMP threads."""
    openmp = library.load_library("cpu")
    openmp.omp_set_num_threads(threads)
    assert openmp.omp_get_max_threads() == threads
    found = hashlib.sha256()
    for name in FUSED:
        for tensor in gradient(OBJECTIVES[name](), make_batch(BORDERS), "cpp"):
            found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def test_every_number_of_threads_gives_the_same_bytes() -> None:
    """In a new process, since OpenMP's threads do not survive a fork: tests may run in a fork, and may fork."""
    code = "from tests.kernels.test_token_pass import digest; print(*map(digest, (1, 2, 7)))"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    digests = fresh.stdout.split()
    assert len(digests) == 3 and len(set(digests)) == 1


def bounds(*values: int) -> dict[str, torch.Tensor]:
    return {"cu_seqlens": torch.tensor(values, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        ({}, {"backend": "numpy"}, UserError, "backend is 'numpy'; expected one of torch, cpp, cuda, triton"),
        ({}, {"backend": "cuda"}, UserError, "'cuda' runs on cuda, but the tensors are on cpu"),
        ({}, {"rule": Rule(RuleFunction(make_batch))}, ValueError, "token_pass: the compiled kernels do not"),
        ({"rollout_logprobs": torch.zeros(14).half()}, {}, ValueError, r"rollout_logprobs is torch.float16 \(14,\)"),
        (bounds(0, 5), {}, ValueError, "cu_seqlens ends at 5, but there are 14 tokens"),
        (bounds(0, 16, 14), {}, ValueError, "must start at 0 and never decrease"),
        (bounds(1, 14), {}, ValueError, "must start at 0 and never decrease"),
    ],
)
def test_error_names_the_wrong_input(changes: dict[str, Any], options: Any, error: Any, message: str) -> None:
    tokens, rule = Tokens.of(make_batch([5, 9])), Rule(RULES["reinforce"])
    with pytest.raises(error, match=message):
        token_pass(**{"rule": rule, "tokens": replace(tokens, **changes)} | options)


class Launches(TorchDispatchMode):
    """Counts operations but views, each at least one launch on a GPU, and refuses those that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        assert not any(word in name for word in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero")), name
        self.count += not any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "fields", "backend"),
    [(*case, "torch") for case in VARIANTS] + [(*case, "cpp") for case in VARIANTS if case[0] in FUSED],
)
def test_launches_are_constant_and_nothing_waits(name: str, fields: dict[str, str], backend: str) -> None:
    """Statistics, loss and gradient take as many operations for 20 tokens as for 2000; none reads a value."""
    objective = build_objective(name, fields)
    counts = []
    for lengths in ([9, 11], [500] * 4, [40] * 50):
        batch = make_batch(lengths)
        objective(batch, objective.statistics(batch.detach(), None, backend), backend)  # constants are made once
        with Launches() as launches:
            terms = objective(batch, objective.statistics(batch.detach(), None, backend), backend)
            torch.autograd.grad(terms.loss.sum(), batch.logprobs)
        counts.append(launches.count)
    assert len(set(counts)) == 1, counts
    if backend == "cpp" and not objective.needs_statistics:
        assert counts[0] < 90, counts
