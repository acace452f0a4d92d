"""``[megatron] fp8``: Transformer Engine's layers multiply matrices in 8 bits; parameters stay bfloat16.

The memory that this takes follows from the source of Transformer Engine 2.6 and Megatron-Core 0.16.1 and was never
measured. An 8-bit copy of every weight and its transpose are cached from an update's first micro-batch on
(``get_weight_workspace`` in ``module/base.py``, ``is_first_microbatch`` in ``extensions/transformer_engine.py``; GPUs
of compute capability 10 need no transpose), and every product keeps its input in 8 bits (``module/linear.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_BLOCK = 32  # mxfp8: elements that share a scale of one byte
_ROW = 128  # blockwise: elements of an input that share a scale of four bytes; weights share one per 128 x 128 block


@dataclass(frozen=True)
class Scaling:
    """Memory and alignment of one way to scale matrices, a value of ``fp8_recipe``."""

    weight: float  # bytes of the 8-bit copy per weight, scales included
    transposes: bool  # whether every GPU needs a separate transposed copy, because scales run along the other axis
    input: float  # bytes per element of a stored input, scales included
    align: int = 16  # a product's tokens must be a multiple of this: ``get_fp8_align_size`` in ``fp8_utils.py``


SCALINGS = {
    "delayed": Scaling(1.0, False, 1.0),
    "tensorwise": Scaling(1.0, False, 1.0),
    "blockwise": Scaling(1 + 4 / _ROW**2, True, 1 + 4 / _ROW),
    "mxfp8": Scaling(1 + 1 / _BLOCK, True, 1 + 1 / _BLOCK, align=32),
}


def scaling_of(megatron: dict[str, Any]) -> str | None:
    """The key in `SCALINGS` that ``[megatron]`` asks for; None without fp8."""
    return str(megatron.get("fp8_recipe", "delayed")) if megatron.get("fp8") else None


def token_alignment(megatron: dict[str, Any]) -> int:
    """The number that the tokens of a micro-batch must be a multiple of on every rank; 1 without fp8."""
    name = scaling_of(megatron)
    return 1 if name is None else SCALINGS[name].align
