"""RMSNorm over the last dimension (arXiv 1910.07467), in C++ for the CPU: one pass over memory forward, one backward.

torch's backward pass on CPUs goes through memory some ten times.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megarl.kernels import library


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, backend: str = "torch") -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight: x [..., d], weight [d] -> as x. backend: "torch", or "cpp" for float32."""
    if backend != "cpp":
        return F.rms_norm(x, weight.shape, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x, width = x.contiguous(), len(weight)
        out, scales = torch.empty_like(x), x.new_empty(rows := x.numel() // width)
        library.call("rms_norm", x.device, x, weight, rows, width, float(eps), out, scales)
        ctx.save_for_backward(x, weight, scales)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scales = ctx.saved_tensors
        for_x, for_weight = torch.empty_like(x), torch.zeros_like(weight)
        sizes = (len(scales), len(weight))
        inputs = (x, weight, scales, gradient.contiguous())
        library.call("rms_norm_backward", x.device, *inputs, *sizes, for_x, for_weight)
        return for_x, for_weight, None
