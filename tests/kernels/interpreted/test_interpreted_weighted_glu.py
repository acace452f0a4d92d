"""The fused activation of experts in Triton's interpreter, compared with its definition."""

from __future__ import annotations

import pytest
import torch

from megarl.kernels.weighted_glu import Glu, weighted_glu

GLUS = {"silu": Glu(), "clamped quick gelu": Glu(1.702, 0.7, 1.0)}


@pytest.mark.parametrize("name", GLUS)
@pytest.mark.parametrize(("rows", "width"), [(21, 200), (8, 128), (1, 5), (0, 16)])
def test_values_and_gradients_equal_the_definition(name: str, rows: int, width: int) -> None:
    """Within 1e-6 in float32; rows and columns within a tile, of a whole tile, and of several."""
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(rows, 2 * width, generator=generator)
    probs, gradient = torch.rand(rows, generator=generator), torch.randn(rows, width, generator=generator)
    results = []
    for backend in ("triton", "torch"):
        inputs = gate_up.clone().requires_grad_(), probs.clone().requires_grad_()
        out = weighted_glu(*inputs, GLUS[name], backend)
        results.append([out, *torch.autograd.grad(out, inputs, gradient)])
    for ours, right in zip(*results, strict=True):
        assert ours.shape == right.shape
        distance = (ours - right).norm().item()
        assert distance <= 1e-6 * right.norm().item()
