"""`linear_logprob` in Triton: the logits live in registers, never in memory.

In the forward pass a program holds a block of tokens and goes through one split of the vocabulary, tile by tile,
updating the statistics of its tokens; the splits are merged afterwards in a fixed order. In the backward pass programs
recompute the tiles of a chunk of tokens and write only the gradient of the logits, which cuBLAS then multiplies with
hidden and weight. There are no atomics, so results are bitwise reproducible. The order of tiles lets neighbouring
programs share token blocks and vocabulary tiles in the L2 cache.

On Hopper the loop over tiles is flattened with the one over the hidden size, so that a tile's operands load while the
previous tile is finished. A tile there is 128 x 256, which loads three quarters of the operands that 128 x 128 tiles
would; its statistics are computed in two halves, so that they fit into the registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from megarl.errors import UserError
from megarl.kernels.linear_logprob.torch_backend import buffer_bytes

GROUP = 16  # token blocks whose programs run at the same time, so that they share vocabulary tiles in the L2 cache
WAVES = 4  # least number of programs per multiprocessor, so that few idle at the end
_LEAST = tl.constexpr(-3.0e38)  # below every logit, but finite, so that the difference of two is not NaN
_MASKED = tl.constexpr(-1.0e30)  # logit of a column beyond the vocabulary: 2^(z - m) is 0, and so is its product with z


@dataclass(frozen=True)
class Tile:
    """Tile sizes and launch settings of both kernels for one dtype and architecture."""

    tokens: int
    columns: int  # of the vocabulary
    depth: int  # of the hidden size
    stages: int  # operands in flight; one less in the backward kernel, whose result passes through shared memory
    descriptors: bool  # load and store through the tensor memory accelerator
    flat: bool  # flatten the loops, and in the backward pass run persistent programs
    warps: int = 8

    @staticmethod
    def of(dtype: torch.dtype, architecture: int) -> Tile:
        accelerator = architecture in (90, 100)
        if dtype is torch.float32:  # exact float32 products, without matrix units
            return Tile(64, 64, 16, 4, descriptors=accelerator, flat=architecture == 90)
        if accelerator:
            return Tile(128, 256, 64, 4, descriptors=True, flat=architecture == 90)
        return Tile(128, 128, 32, 4, descriptors=False, flat=False)

    def constants(self, hidden_size: int) -> dict[str, Any]:
        sizes = dict(H=hidden_size, BLOCK_N=self.tokens, BLOCK_V=self.columns, BLOCK_H=self.depth, GROUP=GROUP)
        return sizes | dict(DESCRIPTORS=self.descriptors, FLAT=self.flat)


@triton.jit
def _place(program, blocks, columns, GROUP: tl.constexpr):
    """Token block and column of a program: GROUP blocks of one column are successive programs, then those of the next
    column."""
    first = program // (GROUP * columns) * GROUP
    size = tl.minimum(blocks - first, GROUP)
    inside = program - first * columns
    return first + inside % size, inside // size


@triton.jit
def _operand(x, row, k, rows, H: tl.constexpr, BLOCK: tl.constexpr, BLOCK_H: tl.constexpr, DESCRIPTORS: tl.constexpr):
    """The [BLOCK, BLOCK_H] part of x [rows, H] that begins at row ``row`` and column ``k``, zero beyond x's borders."""
    if DESCRIPTORS:
        loaded = x.load([row, k])
    else:
        index = row + tl.arange(0, BLOCK)
        depth = k + tl.arange(0, BLOCK_H)
        inside = (index < rows)[:, None] & ((H % BLOCK_H == 0) | (depth < H))[None, :]
        loaded = tl.load(x + index.to(tl.int64)[:, None] * H + depth[None, :], mask=inside, other=0.0)
    return loaded


@triton.jit
def _online(z, columns, target, vocabulary, top, mass, expected, at_target):
    """Update the running statistics with z [tokens, columns] (online softmax); see `megarl.kernels.linear_logprob`."""
    z = tl.where((columns < vocabulary)[None, :], z, _MASKED)
    at_target += tl.sum(tl.where(columns[None, :] == target[:, None], z, 0.0), 1)
    new_top = tl.maximum(top, tl.max(z, 1))
    below = top - new_top
    share = tl.exp2(below)
    z -= new_top[:, None]
    p = tl.exp2(z)
    expected = share * (expected + mass * below) + tl.sum(p * z, 1)
    mass = share * mass + tl.sum(p, 1)
    return new_top, mass, expected, at_target


@triton.jit(do_not_specialize=["tokens", "vocabulary", "splits"])
def statistics_kernel(
    h,  # [N, H], a descriptor or a pointer
    w,  # [V, H], likewise
    targets,  # [N] int64
    out,  # [splits, 4, N] float32
    tokens,
    vocabulary,
    splits,
    scale,
    H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    FLAT: tl.constexpr,
):
    block, split = _place(tl.program_id(0), tl.cdiv(tokens, BLOCK_N), splits, GROUP)
    index = block * BLOCK_N + tl.arange(0, BLOCK_N)
    target = tl.load(targets + index, mask=index < tokens, other=-1).to(tl.int32)
    top = tl.full((BLOCK_N,), _LEAST, tl.float32)
    mass = tl.zeros((BLOCK_N,), tl.float32)
    expected = tl.zeros((BLOCK_N,), tl.float32)
    at_target = tl.zeros((BLOCK_N,), tl.float32)
    HALF: tl.constexpr = BLOCK_V // 2
    tiles = tl.cdiv(vocabulary, BLOCK_V)
    for tile in tl.range(split * tiles // splits, (split + 1) * tiles // splits, flatten=FLAT):
        z = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for k in range(0, H, BLOCK_H):  # inlined by hand: as a function it costs 70 registers
            left = _operand(h, block * BLOCK_N, k, tokens, H, BLOCK_N, BLOCK_H, DESCRIPTORS)
            right = _operand(w, tile * BLOCK_V, k, vocabulary, H, BLOCK_V, BLOCK_H, DESCRIPTORS)
            z = tl.dot(left, right.T, z, input_precision="ieee")
        part, other_part = z.reshape(BLOCK_N, 2, BLOCK_V // 2).permute(0, 2, 1).split()
        for half in tl.static_range(2):
            columns = tile * BLOCK_V + half * HALF + tl.arange(0, HALF)
            top, mass, expected, at_target = _online(
                part * scale, columns, target, vocabulary, top, mass, expected, at_target
            )
            part = other_part
    result = out + split.to(tl.int64) * 4 * tokens + index
    tl.store(result, top, mask=index < tokens)
    tl.store(result + tokens, mass, mask=index < tokens)
    tl.store(result + 2 * tokens.to(tl.int64), expected, mask=index < tokens)
    tl.store(result + 3 * tokens.to(tl.int64), at_target, mask=index < tokens)


@triton.jit(do_not_specialize=["stride", "tokens", "vocabulary"])
def logit_gradients_kernel(
    h,  # [n, H], a descriptor or a pointer
    w,  # [V, H], likewise
    out,  # [n, V], likewise
    targets,  # [n] int64
    coefficients,  # [4, n] float32, rows stride apart
    stride,
    out_stride,  # of the rows of out
    tokens,
    vocabulary,
    scale,
    H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    FLAT: tl.constexpr,
):
    HALF: tl.constexpr = BLOCK_V // 2
    blocks, tiles = tl.cdiv(tokens, BLOCK_N), tl.cdiv(vocabulary, BLOCK_V)
    for program in tl.range(tl.program_id(0), blocks * tiles, tl.num_programs(0), flatten=FLAT):
        block, tile = _place(program, blocks, tiles, GROUP)
        z = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
        for k in range(0, H, BLOCK_H):  # inlined by hand: as a function it costs 70 registers
            left = _operand(h, block * BLOCK_N, k, tokens, H, BLOCK_N, BLOCK_H, DESCRIPTORS)
            right = _operand(w, tile * BLOCK_V, k, vocabulary, H, BLOCK_V, BLOCK_H, DESCRIPTORS)
            z = tl.dot(left, right.T, z, input_precision="ieee")
        part, other_part = z.reshape(BLOCK_N, 2, BLOCK_V // 2).permute(0, 2, 1).split()
        index = block * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = index < tokens
        target = tl.load(targets + index, mask=inside, other=-1).to(tl.int32)
        lse = tl.load(coefficients + index, mask=inside, other=0.0)
        a = tl.load(coefficients + stride + index, mask=inside, other=0.0)
        b = tl.load(coefficients + 2 * stride + index, mask=inside, other=0.0)
        c = tl.load(coefficients + 3 * stride + index, mask=inside, other=0.0)
        for half in tl.static_range(2):
            column = tile * BLOCK_V + half * HALF
            columns = column + tl.arange(0, HALF)
            l = part * scale - lse[:, None]
            dz = tl.exp2(l) * (a[:, None] + b[:, None] * l)
            dz += tl.where(columns[None, :] == target[:, None], c[:, None], 0.0)
            if DESCRIPTORS:
                out.store([block * BLOCK_N, column], dz.to(out.dtype))
            else:
                pointers = out + index.to(tl.int64)[:, None] * out_stride + columns[None, :]
                tl.store(pointers, dz, mask=inside[:, None] & (columns < vocabulary)[None, :])
            part = other_part


def chunk_tokens(hidden: torch.Tensor, rows: int) -> int:
    """Tokens per chunk: as many as fit into the buffer, in chunks of equal size."""
    size = _gradient_dtype(hidden).itemsize * max(1, rows)
    chunks = triton.cdiv(hidden.shape[0], max(1, buffer_bytes(hidden.device) // size))
    return triton.cdiv(triton.cdiv(hidden.shape[0], max(1, chunks)), 128) * 128 or 128


def operands(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs if their rows are contiguous and begin at multiples of 16 bytes, else copies padded with zeros."""
    if hidden.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UserError(
            f'kernel backend "triton" got {hidden.dtype}, but takes bfloat16, float16 and float32; use "torch"'
        )
    return _aligned(hidden), _aligned(weight)


def gradient_buffer(hidden: torch.Tensor, rows: int, chunk_tokens: int) -> torch.Tensor:
    """[tokens, rows] with a row stride of a multiple of 128 bytes, for the tensor memory accelerator and for cuBLAS.

    What is between the rows is zero, in case that a product reads whole vectors of it: NaN times zero is NaN.
    """
    tokens = min(chunk_tokens, hidden.shape[0])
    buffer = hidden.new_empty(tokens, triton.cdiv(rows, 64) * 64, dtype=_gradient_dtype(hidden))
    buffer[:, rows:].zero_()
    return buffer[:, :rows]


def statistics(
    h: torch.Tensor, w: torch.Tensor, local: torch.Tensor, scale: float, chunk_tokens: int, out: torch.Tensor
) -> None:
    """Fill out [4, N] for the logits scale h w^T [N, V]; see `megarl.kernels.linear_logprob`. One pass, no chunks."""
    tokens, vocabulary = h.shape[0], w.shape[0]
    if not tokens:
        return
    tile = Tile.of(h.dtype, _architecture(h))
    blocks = triton.cdiv(tokens, tile.tokens)
    wanted = max(8, triton.cdiv(WAVES * _multiprocessors(h), blocks))
    splits = min(triton.cdiv(vocabulary, tile.columns), wanted)
    partial = h.new_empty(splits, 4, tokens, dtype=torch.float32)
    with torch.cuda.device_of(h):
        statistics_kernel[(blocks * splits,)](
            _argument(h, tile, tile.tokens, tile.depth),
            _argument(w, tile, tile.columns, tile.depth),
            local,
            partial,
            tokens,
            vocabulary,
            splits,
            scale,
            **tile.constants(h.shape[1]),
            **launch_options(tile.warps, tile.stages),
        )
    top, mass, expected, target = partial.unbind(1)
    torch.amax(top, 0, out=out[0])
    below = top - out[0]
    share = below.exp2()
    torch.sum(share * mass, 0, out=out[1])
    torch.sum(share * (expected + mass * below), 0, out=out[2])
    torch.sum(target, 0, out=out[3])


def logit_gradients(
    h: torch.Tensor,
    w: torch.Tensor,
    local: torch.Tensor,
    coefficients: torch.Tensor,
    scale: float,
    with_entropy: bool,  # unused: without it b is 0, and saving one multiplication is not worth a second kernel
    buffer: torch.Tensor,
) -> torch.Tensor:
    """[n, V], the first rows of buffer: 2^l (a + b l) + 1[target] c with l = scale h w^T - lse."""
    tokens, vocabulary = h.shape[0], w.shape[0]
    out = buffer[:tokens]
    tile = Tile.of(h.dtype, _architecture(h))
    programs = triton.cdiv(tokens, tile.tokens) * triton.cdiv(vocabulary, tile.columns)
    if tile.flat:  # persistent programs, which can load the next tile early
        programs = min(programs, _multiprocessors(h))
    with torch.cuda.device_of(h):
        logit_gradients_kernel[(programs,)](
            _argument(h, tile, tile.tokens, tile.depth),
            _argument(w, tile, tile.columns, tile.depth),
            _argument(out, tile, tile.tokens, tile.columns // 2),
            local,
            coefficients,
            coefficients.stride(0),
            out.stride(0),
            tokens,
            vocabulary,
            scale,
            **tile.constants(h.shape[1]),
            **launch_options(tile.warps, tile.stages - 1),
        )
    return out


def _gradient_dtype(hidden: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if hidden.dtype is torch.bfloat16 else torch.float32


def _aligned(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    excess = -x.shape[1] % (16 // x.element_size())
    if excess:
        return F.pad(x, (0, excess))
    return x.clone() if x.data_ptr() % 16 else x


def _argument(x: torch.Tensor, tile: Tile, rows: int, columns: int) -> Any:
    return TensorDescriptor.from_tensor(x, [rows, columns]) if tile.descriptors else x


def _architecture(x: torch.Tensor) -> int:
    if not x.is_cuda:
        return 90  # in Triton's interpreter
    major, minor = torch.cuda.get_device_capability(x.device)
    return 10 * major + minor


def _multiprocessors(x: torch.Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4


def launch_options(warps: int, stages: int) -> dict[str, Any]:
    """Triton's options for a launch."""
    return dict(num_warps=warps, num_stages=stages, enable_fp_fusion=True)
