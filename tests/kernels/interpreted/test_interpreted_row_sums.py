"""Sums of chosen rows in Triton's interpreter, compared with their definition."""

from __future__ import annotations

import pytest
import torch

from megarl.kernels.row_sums import row_sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("m", "k", "width"), [(7, 3, 1100), (5, 8, 32), (3, 1, 16), (0, 2, 16)])
def test_sums_equal_the_definition(m: int, k: int, width: int, dtype: torch.dtype) -> None:
    """Within 1e-6 in float32, and within the one rounding of a result in float16; columns of a program and more."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(m * k + 2, width, generator=generator).to(dtype)
    sources = torch.randperm(m * k + 2, generator=generator)[: m * k].view(m, k)
    right = rows.double()[sources].sum(1)
    ours, definition = (row_sums(rows, sources, backend) for backend in ("triton", "torch"))
    assert ours.dtype == definition.dtype == dtype and ours.shape == definition.shape
    limit = {torch.float32: 1e-6, torch.float16: 2**-11}[dtype] * right.abs() + 1e-6
    assert ((ours - right).abs() <= limit).all() and ((definition - right).abs() <= limit).all()
