"""Host-memory versions of operators that torch has only for CUDA, or that have another kernel there.

Each has a line in `KERNELS`; an operator without one raises a NotImplementedError that names this file. The functions
take and return tensors of the host, and compute in float32 where a GPU accumulates in it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree


def define() -> None:
    """Register all operators under the dispatch key CUDA, after torch has been imported."""
    from tests.rehearsal.device import lib

    for name, function in KERNELS.items():
        LIBRARY.impl(name, _on_device(name, function, lib), "CUDA")
    torch.storage._to = _storage_to(torch.storage._to)


LIBRARY = torch.library.Library("aten", "IMPL")


def _on_device(name: str, function: Callable[..., Any], lib: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if len({x.device for x in tensors}) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, but found several in aten::{name}")
        (device,) = {x.device for x in tensors}
        lib.launched(f"aten::{name}")
        host_args, host_kwargs = pytree.tree_map_only(torch.Tensor, lib.host_view, (args, kwargs))
        out = host_kwargs.pop("out", None)
        results = function(*host_args, **host_kwargs)
        if out is not None:
            out.copy_(results)
            return kwargs["out"]
        return pytree.tree_map_only(torch.Tensor, lambda x: lib.device_view(x, device.index), results)

    return call


def _storage_to(to_host: Callable[..., Any]) -> Callable[..., Any]:
    def to(storage: Any, device: torch.device, non_blocking: bool = False) -> Any:
        if device.type != "cuda":
            return to_host(storage, device, non_blocking)
        # a CPU build cannot make a storage of CUDA, and a CUDA build would with its driver
        empty = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
        return empty.untyped_storage().copy_(storage, non_blocking)

    return to


def _mm(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (a.float() @ b.float()).to(dtype)


def _addmm(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, beta=1, alpha=1) -> torch.Tensor:
    product = alpha * (a.float() @ b.float())
    return (product + beta * x.float() if beta else product).to(dtype)  # beta 0 ignores x, even NaN


def _histc(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    return torch.histc(x.double(), bins, min, max).to(x.dtype)


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, offs=None, bias=None, out_dtype=None) -> torch.Tensor:
    """CPU builds loop over the groups and read ``offs`` on the host; on a GPU it is one kernel.

    On Blackwell a product of two matrices leaves what belongs to an empty group unwritten (pytorch#172439)."""
    if a.dtype is not torch.bfloat16 and a.dtype is not torch.float16 and a.dtype is not torch.float32:
        raise RuntimeError(f"_grouped_mm takes no {a.dtype}")
    for x in (a, b):
        aligned = all(stride * x.element_size() % 16 == 0 for stride in x.stride() if stride != 1)
        if not aligned or x.data_ptr() % 16:
            raise RuntimeError("strides and data of _grouped_mm must be multiples of 16 bytes")
    out = torch._grouped_mm(a, b, offs=offs, bias=bias, out_dtype=out_dtype)
    if a.dim() == b.dim() == 2 and torch.cuda.get_device_capability() >= (10, 0):
        out[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
    return out


def _sequences(query: torch.Tensor, key: torch.Tensor, cu_q: Any, cu_k: Any) -> list[tuple[slice, slice]]:
    if cu_q is None:
        raise NotImplementedError("aten::_flash_attention_forward of padded batches: tests/rehearsal/cuda_only.py")
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    assert ends_q[-1] == len(query) and ends_k[-1] == len(key)
    return [(slice(*q), slice(*k)) for q, k in zip(itertools.pairwise(ends_q), itertools.pairwise(ends_k), strict=True)]


def _scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float | None, left: int = -1) -> torch.Tensor:
    """[..., Q, K] float32; mask and window are aligned to the lower right corner, as FlashAttention's."""
    scores = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1]))
    if causal:
        corner = scores.shape[-1] - scores.shape[-2]
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(corner)
        scores = scores.masked_fill(~(seen if left < 0 else seen.triu(corner - left)), -torch.inf)
    return scores


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None, left: int = -1):
    """[heads, Q, D], [kv heads, K, D] -> [heads, Q, D] float32 and the log of the sums [heads, Q]."""
    group = q.shape[-3] // k.shape[-3]
    k, v = (x.float().repeat_interleave(group, -3) for x in (k, v))
    scores = _scores(q.float(), k, causal, scale, left)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ v, lse


def _attend_backward(grad, q, k, v, out, lse, causal: bool, scale: float | None, left: int = -1):
    kv_heads, group = k.shape[-3], q.shape[-3] // k.shape[-3]
    q, grad, out = q.float(), grad.float(), out.float()
    k, v = (x.float().repeat_interleave(group, -3) for x in (k, v))
    p = (_scores(q, k, causal, scale, left) - lse[..., None]).exp()
    by_score = p * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
    by_score = by_score * (scale or 1 / math.sqrt(q.shape[-1]))
    of_k, of_v = by_score.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad
    return by_score @ k, *(x.unflatten(-3, (kv_heads, group)).sum(-3) for x in (of_k, of_v))


def _check_flash(query: torch.Tensor, dropout: float, options: dict[str, Any]) -> tuple[bool, int]:
    """(whether later keys are masked, how many earlier keys a query attends to, -1 for all)."""
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    left, right = options.get("window_size_left"), options.get("window_size_right")
    if dropout or right not in (None, -1, 0) or (left not in (None, -1) and right != 0):
        raise NotImplementedError("dropout and other windows of FlashAttention: tests/rehearsal/cuda_only.py")
    return right == 0, -1 if left is None else left


def _varlen(query, key, value, cu_q, cu_k, max_q, max_k, dropout, causal, return_debug_mask, **options):
    up_to_own, left = _check_flash(query, dropout, options)
    out, lse = torch.empty_like(query), torch.empty(query.shape[1], len(query))
    for q, k in _sequences(query, key, cu_q, cu_k):
        heads = (x.transpose(0, 1) for x in (query[q], key[k], value[k]))
        attended, sums = _attend(*heads, causal or up_to_own, options.get("scale"), left)
        out[q], lse[:, q] = attended.transpose(0, 1).to(out.dtype), sums
    empty = torch.empty(0)
    return out, lse, torch.zeros(2, dtype=torch.int64), empty, empty


def _varlen_backward(
    grad, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, unused, **options
):
    up_to_own, left = _check_flash(query, dropout, options)
    grads = [torch.empty_like(x) for x in (query, key, value)]
    for q, k in _sequences(query, key, cu_q, cu_k):
        heads = (x.transpose(0, 1) for x in (grad[q], query[q], key[k], value[k], out[q]))
        parts = _attend_backward(*heads, lse[:, q], causal or up_to_own, options.get("scale"), left)
        for whole, rows, part in zip(grads, (q, k, k), parts, strict=True):
            whole[rows] = part.transpose(0, 1).to(whole.dtype)
    return tuple(grads)


def _flash(query, key, value, dropout=0.0, causal=False, return_debug_mask=False, scale=None):
    _check_flash(query, dropout, {})
    out, lse = _attend(query, key, value, causal, scale)
    none = torch.empty(0)
    # as FlashAttention's: [batch, sequence, heads, head_dim] in memory
    out = out.to(query.dtype).transpose(1, 2).contiguous().transpose(1, 2)
    state = torch.zeros(2, dtype=torch.int64)
    return out, lse, none, none.clone(), query.shape[-2], key.shape[-2], state, none.clone(), none.clone()


def _flash_backward(
    grad, query, key, value, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, seed, offset, scale=None
):
    parts = _attend_backward(grad, query, key, value, out, lse, causal, scale)
    return tuple(part.to(x.dtype) for part, x in zip(parts, (query, key, value), strict=True))


def _rms_norm(x: torch.Tensor, shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None):
    axes = tuple(range(x.dim() - len(shape), x.dim()))
    wide = x.float()
    rstd = (wide.square().mean(axes, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt()
    out = wide * rstd if weight is None else wide * rstd * weight.float()
    return out.to(x.dtype), rstd


def _rms_norm_backward(grad, x, shape, rstd, weight, wanted):
    axes, rows = tuple(range(x.dim() - len(shape), x.dim())), tuple(range(x.dim() - len(shape)))
    normal, wide = x.float() * rstd, grad.float()
    scaled = wide if weight is None else wide * weight.float()
    of_x = rstd * (scaled - normal * (scaled * normal).mean(axes, keepdim=True))
    of_weight = (wide * normal).sum(rows).to(weight.dtype) if wanted[1] else None
    return of_x.to(x.dtype) if wanted[0] else None, of_weight


KERNELS: dict[str, Callable[..., Any]] = {
    "mm.dtype": _mm,
    "mm.dtype_out": _mm,
    "bmm.dtype": _mm,
    "bmm.dtype_out": _mm,
    "addmm.dtype": _addmm,
    "addmm.dtype_out": _addmm,
    "histc": _histc,
    "_grouped_mm": _grouped_mm,
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "_flash_attention_forward": _varlen,
    "_flash_attention_backward": _varlen_backward,
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
}
