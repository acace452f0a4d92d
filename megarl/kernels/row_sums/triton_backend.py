"""`row_sums` in Triton: a program sums the rows of one index, for some of their columns."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

COLUMNS = 1024  # of a program: 16 bytes of bfloat16 for each of 128 threads
LAUNCH_OPTIONS = dict(num_warps=4, num_stages=1, enable_fp_fusion=True)


@triton.jit
def row_sums_kernel(rows, sources, out, WIDTH: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    total = tl.zeros((COLUMNS,), tl.float32)
    for j in tl.static_range(K):
        source = tl.load(sources + index * K + j)
        total += tl.load(rows + source * WIDTH + column, inside, 0.0).to(tl.float32)
    tl.store(out + index * WIDTH + column, total.to(out.dtype.element_ty), inside)


def constants(width: int, k: int) -> dict[str, Any]:
    """width: of a row; k: rows of a sum."""
    return dict(WIDTH=width, K=k, COLUMNS=COLUMNS)


def row_sums(rows: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """As `megarl.kernels.row_sums.row_sums`."""
    (m, k), width = sources.shape, rows.shape[1]
    rows, out = rows.contiguous(), rows.new_empty(m, width)
    if m:
        with torch.cuda.device_of(rows):
            row_sums_kernel[(m, triton.cdiv(width, COLUMNS))](
                rows, sources.contiguous(), out, **constants(width, k), **LAUNCH_OPTIONS
            )
    return out
