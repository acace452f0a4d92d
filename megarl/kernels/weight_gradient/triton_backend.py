"""`add_group_products` in Triton: a program holds a tile of one group's gradient and goes through the group's rows."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def group_products_kernel(
    total,  # [groups, M, N] float32
    gradient,  # [n, M]
    inputs,  # [n, N]
    ends,  # [groups] int32
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles: tl.constexpr = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    group, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    first = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
    if first < end:
        m = tile % tl.cdiv(M, BLOCK_M) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tile // tl.cdiv(M, BLOCK_M) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside_m, inside_n = (M % BLOCK_M == 0) | (m < M), (N % BLOCK_N == 0) | (n < N)
        k = tl.arange(0, BLOCK_K)
        of_gradient, of_inputs = k[:, None] * M + m[None, :], k[:, None] * N + n[None, :]
        gradient += first.to(tl.int64) * M
        inputs += first.to(tl.int64) * N
        products = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for rows in range(end - first, 0, -BLOCK_K):
            inside = (k < rows)[:, None]
            left = tl.load(gradient + of_gradient, mask=inside & inside_m[None, :], other=0.0)
            right = tl.load(inputs + of_inputs, mask=inside & inside_n[None, :], other=0.0)
            products = tl.dot(left.T, right, products, input_precision="ieee")
            gradient += BLOCK_K * M
            inputs += BLOCK_K * N
        total += group.to(tl.int64) * M * N
        HALF: tl.constexpr = BLOCK_N // 2
        part, other_part = products.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        for half in tl.static_range(2):  # both at a time would need too many registers
            n = tile // tl.cdiv(M, BLOCK_M) * BLOCK_N + half * HALF + tl.arange(0, HALF)
            of_total = m[:, None] * N + n[None, :]
            inside = inside_m[:, None] & ((N % BLOCK_N == 0) | (n < N))[None, :]
            tl.store(total + of_total, tl.load(total + of_total, mask=inside) + part, mask=inside)
            part = other_part


def launch(outputs: int, inputs: int, architecture: int) -> dict[str, Any]:
    """The kernel's constants and Triton's options; on sm_90 the fastest of seven sizes at 1,024 and 4,096 tokens."""
    large = architecture >= 90  # 192 KiB of shared memory
    return dict(M=outputs, N=inputs, BLOCK_M=128, BLOCK_N=256 if large else 128, BLOCK_K=64) | dict(
        num_warps=8, num_stages=4 if large else 3, enable_fp_fusion=True
    )


def add_group_products(total: torch.Tensor, gradient: torch.Tensor, inputs: torch.Tensor, ends: torch.Tensor) -> None:
    """As `megarl.kernels.weight_gradient.add_group_products`; all contiguous."""
    groups, outputs, width = total.shape
    options = launch(outputs, width, 10 * torch.cuda.get_device_capability(total.device)[0] if total.is_cuda else 90)
    tiles = triton.cdiv(outputs, options["BLOCK_M"]) * triton.cdiv(width, options["BLOCK_N"])
    with torch.cuda.device_of(total):
        group_products_kernel[(groups * tiles,)](total, gradient, inputs, ends, **options)
