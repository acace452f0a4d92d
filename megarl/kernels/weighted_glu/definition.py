"""The definition of `megarl.kernels.weighted_glu.weighted_glu`."""

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


def in_torch(gate_up: torch.Tensor, probs: torch.Tensor, glu: Glu) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    if glu.limit is not None:
        gate, up = gate.clamp(max=glu.limit), up.clamp(-glu.limit, glu.limit)
    if glu.offset:
        up = up + glu.offset
    activated = F.silu(gate) if glu.sharpness == 1 else gate * torch.sigmoid(glu.sharpness * gate)
    return (activated * up * probs[:, None]).to(gate_up.dtype)
