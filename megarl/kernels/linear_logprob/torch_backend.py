"""`linear_logprob` in plain torch: the portable backend, and the one for a CPU.

Matrix products run over chunks of tokens, large enough to be efficient. The elementwise work after a product runs over
blocks of its rows, small enough to stay in a CPU's cache; on a GPU a block is a whole chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

CPU_BUFFER_BYTES = 256 * 2**20
CPU_BLOCK_BYTES = 16 * 2**20


def buffer_bytes(device: torch.device) -> int:
    """Bytes that the logits of a chunk may take: on a GPU a 64th of its memory (2.2 GB of 141), enough for efficient
    matrix products."""
    return torch.cuda.get_device_properties(device).total_memory // 64 if device.type == "cuda" else CPU_BUFFER_BYTES


def chunks(tokens: int, chunk_tokens: int) -> Iterator[slice]:
    """Slices of at most ``chunk_tokens`` that cover ``tokens``."""
    for start in range(0, tokens, chunk_tokens):
        yield slice(start, start + chunk_tokens)


def chunk_tokens(hidden: torch.Tensor, rows: int) -> int:
    return max(1, buffer_bytes(hidden.device) // (_dtype(hidden).itemsize * max(1, rows)))


def operands(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """On a GPU unchanged, since its matrix units accumulate half-precision products in float32; on a CPU converted to
    float32 or wider."""
    return (hidden, weight) if hidden.is_cuda else (hidden.to(_dtype(hidden)), weight.to(_dtype(hidden)))


def gradient_buffer(hidden: torch.Tensor, rows: int, chunk_tokens: int) -> torch.Tensor:
    return hidden.new_empty(min(chunk_tokens, hidden.shape[0]), rows, dtype=_dtype(hidden))


def statistics(
    h: torch.Tensor, w: torch.Tensor, local: torch.Tensor, scale: float, chunk_tokens: int, out: torch.Tensor
) -> None:
    """Fill out [4, N] for the logits scale h w^T [N, V]; see `megarl.kernels.linear_logprob`."""
    buffer = gradient_buffer(h, w.shape[0], chunk_tokens)
    for chunk in chunks(h.shape[0], chunk_tokens):
        logits = _logits(h[chunk], w, scale, buffer)
        for block in _blocks(logits):
            z, at, (top, mass, expected, target) = logits[block], local[chunk][block], out[:, chunk][:, block]
            torch.amax(z, 1, out=top)
            z.sub_(top[:, None])
            target.copy_((z.gather(1, at.clamp(0)[:, None])[:, 0] + top).masked_fill_(at < 0, 0))
            p = z.exp2()  # not exp, which takes a CPU a hundred times as long where the result is subnormal
            torch.sum(p, 1, out=mass)
            torch.sum(p.mul_(z), 1, out=expected)


def logit_gradients(
    h: torch.Tensor,
    w: torch.Tensor,
    local: torch.Tensor,
    coefficients: torch.Tensor,
    scale: float,
    with_entropy: bool,
    buffer: torch.Tensor,
) -> torch.Tensor:
    """[n, V], in buffer unless the inputs are half-precision: 2^l (a + b l) + 1[target] c, l = scale h w^T - lse."""
    gradients = _logits(h, w, scale, buffer)
    for block in _blocks(gradients):
        dz, at = gradients[block], local[block, None]
        lse, a, b, c = coefficients[:, block, None]
        dz.sub_(lse)
        if with_entropy:
            p = dz.exp2()
            dz.mul_(b).add_(a).mul_(p)
        else:
            dz.exp2_().mul_(a)
        dz.scatter_add_(1, at.clamp(0), c)
    return gradients.to(h.dtype)


def _dtype(hidden: torch.Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _logits(h: torch.Tensor, w: torch.Tensor, scale: float, buffer: torch.Tensor) -> torch.Tensor:
    out = buffer[: h.shape[0]]
    if h.dtype is out.dtype:
        return torch.addmm(out, h, w.t(), beta=0, alpha=scale, out=out)
    return torch.addmm(out, h, w.t(), out_dtype=out.dtype, beta=0, alpha=scale, out=out)


def _blocks(logits: torch.Tensor) -> list[slice]:
    rows, columns = logits.shape
    size = rows if logits.is_cuda else max(1, CPU_BLOCK_BYTES // (logits.element_size() * columns))
    return list(chunks(rows, size))
