"""The kernels of experts in Triton's interpreter, compared with their definitions."""

from __future__ import annotations

import pytest
import torch

from megarl.kernels.row_sums import row_sums
from megarl.kernels.weight_gradient import add_group_products
from megarl.kernels.weighted_glu import Glu, weighted_glu

DTYPES = [torch.float32, torch.float16]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k", "width"), [(7, 3, 1100), (5, 8, 32), (3, 1, 16), (0, 2, 16)])
def test_sums_of_rows(m: int, k: int, width: int, dtype: torch.dtype, generator: torch.Generator) -> None:
    """Within 1e-6 in float32, and within the one rounding of a result in float16; columns of a program and more."""
    rows = torch.randn(m * k + 2, width, generator=generator).to(dtype)
    sources = torch.randperm(m * k + 2, generator=generator)[: m * k].view(m, k)
    right = rows.double()[sources].sum(1)
    ours, definition = (row_sums(rows, sources, backend) for backend in ("triton", "torch"))
    assert ours.dtype == definition.dtype == dtype and ours.shape == definition.shape
    limit = {torch.float32: 1e-6, torch.float16: 2**-11}[dtype] * right.abs() + 1e-6
    assert ((ours - right).abs() <= limit).all() and ((definition - right).abs() <= limit).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "outputs", "width"),
    [([70, 0, 3, 64], 24, 136), ([5, 129], 128, 128), ([0, 0], 16, 16), ([1], 144, 8)],
    ids=["ragged", "whole tiles", "no rows", "one row"],
)
def test_totals_grow_by_the_products_of_groups_of_rows(
    lengths: list[int], outputs: int, width: int, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """Within 1e-6 of their length; rows after the last group do not count, and a group without rows keeps its bits."""
    ends = torch.tensor(lengths).cumsum(0)
    sizes = (outputs, width)
    gradient, inputs = (torch.randn(int(ends[-1]) + 2, size, generator=generator).to(dtype) for size in sizes)
    total = torch.randn(len(lengths), outputs, width, generator=generator)
    before = total.clone()
    add_group_products(total, gradient, inputs, ends.int())
    for group, (length, end) in enumerate(zip(lengths, ends.tolist(), strict=True)):
        rows = slice(end - length, end)
        right = before[group].double() + gradient[rows].double().t() @ inputs[rows].double()
        assert (total[group] - right).norm() <= 1e-6 * right.norm()
        assert length or torch.equal(total[group], before[group])


@pytest.mark.parametrize("glu", [Glu(), Glu(1.702, 0.7, 1.0)], ids=["silu", "clamped quick gelu"])
@pytest.mark.parametrize(("rows", "width"), [(21, 200), (8, 128), (1, 5), (0, 16)])
def test_activation_and_its_gradients(glu: Glu, rows: int, width: int, generator: torch.Generator) -> None:
    """Within 1e-6 in float32; rows and columns within a tile, of a whole tile, and of several."""
    gate_up = torch.randn(rows, 2 * width, generator=generator)
    probs, gradient = torch.rand(rows, generator=generator), torch.randn(rows, width, generator=generator)
    results = []
    for backend in ("triton", "torch"):
        inputs = gate_up.clone().requires_grad_(), probs.clone().requires_grad_()
        out = weighted_glu(*inputs, glu, backend)
        results.append([out, *torch.autograd.grad(out, inputs, gradient)])
    for ours, right in zip(*results, strict=True):
        assert ours.shape == right.shape
        assert (ours - right).norm().item() <= 1e-6 * right.norm().item()
