"""Causal attention of packed pieces of a few tokens on the CPU, in C++.

torch's attention takes equally long pieces at a time, with a copy of their keys, and has a fixed cost per piece, which
is most of the time when a piece has ten tokens. Here all pieces are one call that reads queries, keys and values where
they are. `PackedAttention._by_size` in `megarl/actor/attention.py` is the definition.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megarl.kernels import library

LONGEST = 32  # keys of a piece, about: with more, torch is faster, since its blocks reuse what they have read


def short_attention(
    query: torch.Tensor,  # [T, heads, d]
    key: torch.Tensor,  # [N, kv_heads, d]
    value: torch.Tensor,  # [N, kv_heads, d]
    queries: torch.Tensor | None,  # [Q] int64, row of each query; None: in order
    keys: torch.Tensor | None,  # [K] int64, row of each key; None: in order
    outputs: torch.Tensor | None,  # [T] int64, the query whose output each row takes; None: in order
    cu_seqlens_q: torch.Tensor,  # [pieces + 1] int32
    cu_seqlens_k: torch.Tensor,  # [pieces + 1] int32
    scale: float,
) -> torch.Tensor:
    """[T, heads, d] float32. Piece i has the queries ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]``, likewise keys; its
    last query attends to all of its keys, each query before that to one key less."""
    return _ShortAttention.apply(query, key, value, (queries, outputs, keys, cu_seqlens_q, cu_seqlens_k), scale)


class _Pieces(ctypes.Structure):
    """``megarl_pieces`` of the header. Keep the tensors alive while a kernel may read them."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("queries", "outputs", "keys", "cu_seqlens_q", "cu_seqlens_k")),
        *((name, ctypes.c_int64) for name in ("num_pieces", "heads", "kv_heads", "width")),
        ("scale", ctypes.c_float),
    ]


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, places: Any, scale: float
    ) -> Any:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        heads, *of_keys = query.shape[1], *key.shape[1:]
        pointers = (None if x is None else x.data_ptr() for x in places)
        *_, cu_seqlens_q, cu_seqlens_k = ctx.places = places
        ctx.pieces = _Pieces(*pointers, len(cu_seqlens_q) - 1, heads, *of_keys, scale)
        scores = int((cu_seqlens_q.diff() * cu_seqlens_k.diff()).sum())
        out, probs = torch.empty_like(query), query.new_empty(heads * scores)
        library.call("short_attention", query.device, ctx.pieces, query, key, value, out, probs)
        ctx.save_for_backward(query, key, value, probs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, probs = ctx.saved_tensors
        gradients = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        inputs = (query, key, value, probs, gradient.contiguous())
        library.call("short_attention_backward", query.device, ctx.pieces, *inputs, *gradients)
        return *gradients, None, None
