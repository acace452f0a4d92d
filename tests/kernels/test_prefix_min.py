"""Both backends of the segmented exclusive running minimum against the loop of `megarl.kernels.reference`."""

from __future__ import annotations

import importlib.metadata
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import UserError
from megarl.kernels import library, reference
from megarl.kernels.prefix_min import BACKENDS, _prefix_min_cpp, prefix_min
from tests.helpers import ROOT

NAN, INF = math.nan, math.inf
both = pytest.mark.parametrize("backend", BACKENDS)


def tensors(values: list[float], mask: list[int], lengths: list[int]) -> tuple[torch.Tensor, ...]:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return torch.tensor(values, dtype=torch.float32), torch.tensor(mask, dtype=torch.bool), cu_seqlens


def equal(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@both
def test_by_hand(backend: str) -> None:
    values = [-1.0, 0.5, -2.0, 7.0, 3.0, -9.0, 2.0, 5.0]
    mask = [1, 1, 1, 1, 1, 0, 1, 1]  # -9 is a prompt token
    out = prefix_min(*tensors(values, mask, [4, 4]), backend=backend)
    equal(out, torch.tensor([0.0, -1.0, -1.0, -2.0, 0.0, 3.0, 3.0, 2.0]))


@both
def test_nan_and_infinity(backend: str) -> None:
    values = [1.0, NAN, -INF, 2.0, NAN, INF, 0.0, INF]
    mask = [1, 1, 1, 1, 0, 1, 0, 1]  # the second NaN is masked
    out = prefix_min(*tensors(values, mask, [4, 4]), backend=backend)
    equal(out, torch.tensor([0.0, 1.0, NAN, NAN, 0.0, 0.0, INF, INF]))
    equal(prefix_min(*tensors([-NAN, 1.0, -INF], [1, 1, 1], [3]), backend=backend), torch.tensor([0.0, NAN, NAN]))


floats = st.floats(width=32, allow_nan=True) | st.sampled_from([0.0, -0.0, 1e-45, -1e-45, INF, -INF])
sequences = st.lists(st.lists(st.tuples(floats, st.booleans()), max_size=9), max_size=7)


@both
@settings(max_examples=200, deadline=None)
@given(packed=sequences)
def test_equals_the_loop(backend: str, packed: list[list[tuple[float, bool]]]) -> None:
    tokens = [token for sequence in packed for token in sequence]
    inputs = tensors([v for v, _ in tokens], [m for _, m in tokens], [len(s) for s in packed])
    equal(prefix_min(*inputs, backend=backend), reference.prefix_min(*inputs))


@both
def test_many_long_sequences(backend: str) -> None:
    """Enough tokens for several threads; the reference here is a running minimum a sequence."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 4000, (40,), generator=generator).tolist()
    total = sum(lengths)
    log_ratio = torch.randn(total, generator=generator).cumsum(0)
    mask = torch.rand(total, generator=generator) < 0.8
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    out = prefix_min(log_ratio, mask, cu_seqlens, backend)
    for got, values, trained in zip(out.split(lengths), log_ratio.split(lengths), mask.split(lengths), strict=True):
        running = torch.where(trained, values, INF).cummin(0).values if len(values) else values
        wanted = torch.cat([running.new_full((1,), INF), running])[: len(values)]
        equal(got, torch.where(wanted == INF, 0, wanted))


@both
def test_carries_no_gradient_and_takes_strided_inputs(backend: str) -> None:
    values, mask, cu_seqlens = tensors([3.0, -1.0, 2.0], [1, 1, 1], [3])
    strided = torch.stack([values, values + 9], 1)[:, 0].requires_grad_()
    out = prefix_min(strided, mask, cu_seqlens, backend)
    equal(out, torch.tensor([0.0, 3.0, -1.0]))
    assert not out.requires_grad


@both
def test_wrong_inputs(backend: str) -> None:
    values, mask, cu_seqlens = tensors([3.0, -1.0, 2.0], [1, 1, 1], [3])
    with pytest.raises(ValueError, match=r"log_ratio is torch.float64 \(3,\) on cpu; expected torch.float32"):
        prefix_min(values.double(), mask, cu_seqlens, backend)
    with pytest.raises(ValueError, match=r"mask is torch.float32"):
        prefix_min(values, values, cu_seqlens, backend)
    with pytest.raises(ValueError, match=r"expected \[T\], \[T\], \[S\+1\]"):
        prefix_min(values, mask[:2], cu_seqlens, backend)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [([0, 2], "ends at 2, but there are 3"), ([1, 3], "must start at 0"), ([0, 3, 1, 3], "never decrease")],
)
def test_compiled_kernel_refuses_wrong_boundaries(bounds: list[int], message: str) -> None:
    values, mask, _ = tensors([3.0, -1.0, 2.0], [1, 1, 1], [3])
    with pytest.raises(ValueError, match=message):
        prefix_min(values, mask, torch.tensor(bounds, dtype=torch.int32), "cpp")


def test_operator_is_registered_properly() -> None:
    inputs = tensors([3.0, -1.0, 2.0, 4.0], [1, 0, 1, 1], [3, 1])
    torch.library.opcheck(_prefix_min_cpp, inputs)
    compiled = torch.compile(lambda *x: prefix_min(*x, backend="cpp") + 1, backend="eager", fullgraph=True)
    equal(compiled(*inputs), torch.tensor([1.0, 4.0, 4.0, 1.0]))


def test_unknown_backend() -> None:
    with pytest.raises(UserError, match="kernel backend is 'triton'; expected one of torch, cpp"):
        prefix_min(*tensors([1.0], [1], [1]), backend="triton")


@pytest.mark.parametrize("installed", [True, False])
def test_missing_library_names_the_remedy(installed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if installed:
        empty = importlib.metadata.PathDistribution(tmp_path / "megarl.dist-info")
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name: empty)
    else:
        monkeypatch.setattr(importlib.metadata.Distribution, "discover", lambda **kwargs: iter(()))
    assert library.find_library("cpu") is None
    with pytest.raises(UserError, match=r"compiled cpu kernels are not installed; .*: pip install \."):
        library.load_library.__wrapped__("cpu")


def test_outdated_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    current = library.ABI_VERSION
    monkeypatch.setattr(library, "ABI_VERSION", current + 1)
    with pytest.raises(UserError, match=f"has ABI version {current}, but megarl needs {current + 1}"):
        library.load_library.__wrapped__("cpu")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_cuda_source_compiles(tmp_path: Path) -> None:
    source = ROOT / "csrc/cuda/prefix_min.cu"
    command = ["nvcc", "-std=c++17", "-cubin", "-arch=sm_90", f"-I{ROOT}/csrc/include", "-o", "x.cubin", str(source)]
    subprocess.run(command, cwd=tmp_path, check=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@both
def test_cuda_device(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [0, 1, 1023, 1024, 1025, 5000]
    log_ratio = torch.randn(sum(lengths), generator=generator).cumsum(0)
    log_ratio[3000] = NAN
    mask = torch.rand(sum(lengths), generator=generator) < 0.8
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    out = prefix_min(log_ratio.cuda(), mask.cuda(), cu_seqlens.cuda(), backend)
    equal(out.cpu(), prefix_min(log_ratio, mask, cu_seqlens))
