"""`weighted_glu` in Triton: a program has some rows and goes through their columns; sums over a row need no atomics."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

ROWS, COLUMNS = 8, 128  # of a tile: 16 bytes of bfloat16 for each of 128 threads
LAUNCH_OPTIONS = dict(num_warps=4, num_stages=1, enable_fp_fusion=True)


@triton.jit
def _tile(gate_up, row, column, rows, F: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """Gate and up of a tile in float32, clamped and with the offset; where their gradients pass the clamps."""
    inside = (row < rows)[:, None] & (column < F)[None, :]
    at = gate_up + row.to(tl.int64)[:, None] * (2 * F) + column[None, :]
    gate = tl.load(at, inside, 0.0).to(tl.float32)
    up = tl.load(at + F, inside, 0.0).to(tl.float32)
    gate_passes, up_passes = inside, inside
    if LIMIT is not None:
        gate_passes = gate <= LIMIT
        up_passes = (up >= -LIMIT) & (up <= LIMIT)
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return gate, up + OFFSET, gate_passes, up_passes, inside


@triton.jit
def weighted_glu_kernel(
    gate_up, probs, out, rows,
    F: tl.constexpr, SHARPNESS: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    p = tl.load(probs + row, row < rows, 0.0).to(tl.float32)[:, None]
    for start in range(0, F, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        gate, up, _, _, inside = _tile(gate_up, row, column, rows, F, LIMIT, OFFSET)
        result = gate * tl.sigmoid(SHARPNESS * gate) * up * p
        at = out + row.to(tl.int64)[:, None] * F + column[None, :]
        tl.store(at, result.to(out.dtype.element_ty), inside)


@triton.jit
def weighted_glu_gradients_kernel(
    gradient, gate_up, probs, out, out_probs, rows,
    F: tl.constexpr, SHARPNESS: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    p = tl.load(probs + row, row < rows, 0.0).to(tl.float32)[:, None]
    of_probs = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, F, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        gate, up, gate_passes, up_passes, inside = _tile(gate_up, row, column, rows, F, LIMIT, OFFSET)
        g = tl.load(gradient + row.to(tl.int64)[:, None] * F + column[None, :], inside, 0.0).to(tl.float32)
        share = tl.sigmoid(SHARPNESS * gate)
        activated = gate * share
        of_probs += g * (activated * up)
        g *= p
        of_gate = g * up * (share * (1 + SHARPNESS * gate * (1 - share)))
        at = out + row.to(tl.int64)[:, None] * (2 * F) + column[None, :]
        tl.store(at, tl.where(gate_passes, of_gate, 0.0).to(out.dtype.element_ty), inside)
        tl.store(at + F, tl.where(up_passes, g * activated, 0.0).to(out.dtype.element_ty), inside)
    tl.store(out_probs + row, tl.sum(of_probs, 1).to(out_probs.dtype.element_ty), row < rows)


def constants(width: int, glu: Any) -> dict[str, Any]:
    """width: F."""
    sizes = dict(F=width, ROWS=ROWS, COLUMNS=COLUMNS)
    return sizes | dict(SHARPNESS=glu.sharpness, LIMIT=glu.limit, OFFSET=glu.offset)


class WeightedGlu(torch.autograd.Function):
    """gate_up [n, 2 F], probs [n] -> [n, F]."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, probs: torch.Tensor, glu: Any) -> torch.Tensor:
        gate_up, ctx.glu = gate_up.contiguous(), glu
        ctx.save_for_backward(gate_up, probs)
        n, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(n, width)
        if n:
            with torch.cuda.device_of(gate_up):
                weighted_glu_kernel[(triton.cdiv(n, ROWS),)](
                    gate_up, probs, out, n, **constants(width, glu), **LAUNCH_OPTIONS
                )
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate_up, probs = ctx.saved_tensors
        n, width = gradient.shape
        out, out_probs = torch.empty_like(gate_up), torch.empty_like(probs)
        if n:
            with torch.cuda.device_of(gate_up):
                weighted_glu_gradients_kernel[(triton.cdiv(n, ROWS),)](
                    gradient.contiguous(), gate_up, probs, out, out_probs, n,
                    **constants(width, ctx.glu), **LAUNCH_OPTIONS,
                )  # fmt: skip
        return out, out_probs, None
