"""``[megatron] fp8``: matrices of Transformer Engine's layers multiplied in 8 bits; parameters stay bfloat16.

What it takes of memory is read from the source of Transformer Engine 2.6 and Megatron-Core 0.16.1, and was never
measured: of every weight a copy in 8 bits and its transpose are cached from an update's first micro-batch on
(``get_weight_workspace`` in ``module/base.py``, ``is_first_microbatch`` in ``extensions/transformer_engine.py``; GPUs
of compute capability 10 multiply without a transpose), and a matrix keeps its input in 8 bits (``module/linear.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_BLOCK = 32  # elements that share a scale of one byte (mxfp8)
_ROW = 128  # elements of an input that share a scale of four bytes (blockwise); those of weights share it in 128 x 128


@dataclass(frozen=True)
class Scaling:
    """How the matrices are scaled, ``fp8_recipe``."""

    weight: float  # bytes of a copy, for each weight
    transposes: bool  # whether its transpose is other bytes on any GPU: the scales run along the other axis
    input: float  # bytes, for each element
    align: int = 16  # tokens of a product: ``get_fp8_align_size`` in ``fp8_utils.py``


SCALINGS = {
    "delayed": Scaling(1.0, False, 1.0),
    "tensorwise": Scaling(1.0, False, 1.0),
    "blockwise": Scaling(1 + 4 / _ROW**2, True, 1 + 4 / _ROW),
    "mxfp8": Scaling(1 + 1 / _BLOCK, True, 1 + 1 / _BLOCK, align=32),
}


def scaling_of(megatron: dict[str, Any]) -> str | None:
    """The name of the scaling that ``[megatron]`` asks for; None without fp8."""
    return str(megatron.get("fp8_recipe", "delayed")) if megatron.get("fp8") else None


def token_alignment(megatron: dict[str, Any]) -> int:
    """Of how many tokens a micro-batch must be a multiple on every rank."""
    name = scaling_of(megatron)
    return 1 if name is None else SCALINGS[name].align
