"""Sums of rows of a matrix, chosen by index: how a token gets its experts' outputs, in one pass over them.

The definition gathers all rows into a new matrix first, which it then reads again.
"""

from __future__ import annotations

import torch


def row_sums(rows: torch.Tensor, sources: torch.Tensor, backend: str = "torch") -> torch.Tensor:
    """out[i] = sum over j of rows[sources[i, j]]: rows [n, width], sources [m, k] int64 -> [m, width] as ``rows``.

    Sums are taken in float32 in the order of j. No gradient is defined here.
    backend: "torch", or "triton", which needs a GPU or Triton's interpreter.
    """
    if sources.shape[1] == 1:
        return rows.index_select(0, sources[:, 0])
    if backend == "torch":
        # torch accumulates sums of bfloat16 in float32
        return rows.index_select(0, sources.flatten()).view(*sources.shape, rows.shape[1]).sum(1)
    from megarl.kernels.row_sums import triton_backend

    return triton_backend.row_sums(rows, sources)
