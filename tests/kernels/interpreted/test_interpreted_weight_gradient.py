"""Products of groups of rows, added to a total, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from megarl.kernels.weight_gradient import add_group_products


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("lengths", "outputs", "width"),
    [([70, 0, 3, 64], 24, 136), ([5, 129], 128, 128), ([0, 0], 16, 16), ([1], 144, 8)],
    ids=["ragged", "whole tiles", "no rows", "one row"],
)
def test_totals_grow_by_the_products(lengths: list[int], outputs: int, width: int, dtype: torch.dtype) -> None:
    """Within 1e-6 of their length; rows after the last group do not count, and a group without rows keeps its bits."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    ends = torch.tensor(lengths).cumsum(0)
    gradient, inputs = (random(int(ends[-1]) + 2, size).to(dtype) for size in (outputs, width))
    total = random(len(lengths), outputs, width)
    before = total.clone()
    add_group_products(total, gradient, inputs, ends.int())
    for group, (length, end) in enumerate(zip(lengths, ends.tolist(), strict=True)):
        rows = slice(end - length, end)
        right = before[group].double() + gradient[rows].double().t() @ inputs[rows].double()
        assert (total[group] - right).norm() <= 1e-6 * right.norm()
        assert length or torch.equal(total[group], before[group])
