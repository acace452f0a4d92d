"""The activation of an expert and its weight in one operation: act(gate) (up + offset) p, for rows of gate and up.

`_in_torch` is the definition. The Triton kernels read gate and up once and write the result once, forward; backward
they read them once more and write their gradient, where the definition goes through memory some ten times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class Glu:
    """act(x) = x sigmoid(sharpness x): 1 is SiLU, 1.702 quick GELU (arXiv 1606.08415)."""

    sharpness: float = 1.0
    limit: float | None = None  # gate is clamped to at most this, up to within -limit and limit
    offset: float = 0.0


def weighted_glu(gate_up: torch.Tensor, probs: torch.Tensor, glu: Glu, backend: str = "torch") -> torch.Tensor:
    """gate_up [n, 2 F], columns of gate before those of up, and probs [n] -> [n, F] in the dtype of gate_up.

    backend: "torch", or "triton", which computes in float32 and needs a GPU or Triton's interpreter.
    """
    if backend == "torch":
        return _in_torch(gate_up, probs, glu)
    from megarl.kernels.weighted_glu.triton_backend import WeightedGlu

    return WeightedGlu.apply(gate_up, probs, glu)


def _in_torch(gate_up: torch.Tensor, probs: torch.Tensor, glu: Glu) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    if glu.limit is not None:
        gate, up = gate.clamp(max=glu.limit), up.clamp(-glu.limit, glu.limit)
    if glu.offset:
        up = up + glu.offset
    activated = F.silu(gate) if glu.sharpness == 1 else gate * torch.sigmoid(glu.sharpness * gate)
    return (activated * up * probs[:, None]).to(gate_up.dtype)
