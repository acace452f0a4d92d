"""Gradients of weights, added where Megatron sums them up over the micro-batches of an update: ``weight.main_grad``.

For a bfloat16 weight that is a float32 buffer. A gradient that autograd returns is rounded to bfloat16, written, read
again and added to the buffer by Megatron's hook; one that the backward pass adds itself is not rounded, and a third of
these bytes move. Megatron's own products do so under ``gradient_accumulation_fusion``, by a kernel of Apex.
"""

from __future__ import annotations

import torch


def main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """The buffer to which a backward pass may add the gradient of ``weight`` itself; None if it has to return it.

    A tied embedding, which Megatron marks by zero_out_wgrad, gets a second gradient from autograd.
    """
    buffer: torch.Tensor | None = getattr(weight, "main_grad", None)
    if buffer is None or buffer.dtype is weight.dtype or getattr(weight, "zero_out_wgrad", False):
        return None
    return buffer


def added(weight: torch.Tensor) -> torch.Tensor:
    """What a backward pass returns for a weight whose gradient is in `main_grad`: memory that Megatron's hook drops."""
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(weight)


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """total += a b in place, rounded only to the dtype of ``total``: float32, or that of both factors."""
    if total.dtype is a.dtype:
        return total.addmm_(a, b)
    return torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def add_group_products(total: torch.Tensor, gradient: torch.Tensor, inputs: torch.Tensor, ends: torch.Tensor) -> None:
    """total[g] += gradient[rows]^T inputs[rows] for the rows ``ends[g - 1]`` to ``ends[g]`` of each group, in Triton.

    total [groups, out, in] float32, gradient [n, out], inputs [n, in], ends [groups] int32, which stays on the device.
    A group without rows is not touched. Sums are taken in the order of the rows: the same bits each time.
    """
    from megarl.kernels.weight_gradient import triton_backend

    triton_backend.add_group_products(total, gradient.contiguous(), inputs.contiguous(), ends)
