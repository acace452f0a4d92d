"""Attention with sinks: each head has one more logit in its softmax, to which no value belongs (arXiv 2508.10925).

With the log-sum-exp L over the keys and the sink s, the output without the sink is multiplied by sigmoid(L - s).
Gradients are those of plain attention for the output and the log-sum-exp that include the sink, log(exp(L) + exp(s)),
so flash attention's own backward pass computes them when it is given these two.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

Lengths = tuple[torch.Tensor, torch.Tensor, int, int]  # cu_seqlens of queries and of keys, max_seqlen of both


def causal_window(queries: int, keys: int, before: int | None, device: torch.device) -> torch.Tensor:
    """Mask [queries, keys] bool, aligned to the lower right corner; True where the query attends to the key: its own
    position and ``before`` positions before it, None: all before it."""
    last = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    seen = key <= last
    return seen if before is None else seen & (key >= last - before)


def with_sink(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Express sinks by plain attention: all vectors get one more dimension, and there is a new first key, whose product
    with any query is the head's sink and whose value is zero.

    query [n, heads, Q, d], key and value [n, kv_heads, K, d], sinks [heads] -> the three with d + 1 and K + 1.
    """
    sink_queries = sinks.to(query.dtype)[:, None, None].expand(*query.shape[:-1], 1)
    is_sink = (torch.arange(key.shape[2] + 1, device=key.device) == 0).to(key.dtype)
    sink_keys = is_sink[:, None].expand(*key.shape[:2], -1, 1)
    query, key = torch.cat([query, sink_queries], -1), torch.cat([F.pad(key, (0, 0, 1, 0)), sink_keys], -1)
    return query, key, F.pad(value, (0, 1, 1, 0))


class _Flash(torch.autograd.Function):
    """`flash_with_sinks`; calls the same operators as `torch.nn.attention.varlen` of torch 2.13."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor,
        lengths: Lengths,
        window: tuple[int, int],
        scale: float,
    ) -> torch.Tensor:
        options = dict(scale=scale, window_size_left=window[0], window_size_right=window[1])
        causal = window == (-1, 0)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, *lengths, 0.0, causal, return_debug_mask=False, **options
        )
        whole = torch.logaddexp(lse, sinks.float()[:, None])  # [heads, T], log-sum-exp with the sink
        out = (out * (lse - whole).exp().t()[..., None]).to(query.dtype)
        ctx.save_for_backward(query, key, value, out, whole, sinks, *lengths[:2])
        ctx.longest, ctx.causal, ctx.options = lengths[2:], causal, options
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, whole, sinks, *offsets = ctx.saved_tensors
        gradient = gradient.contiguous()
        random = torch.zeros(2, dtype=torch.uint64, device=query.device)  # state for dropout, which is not used
        gradients = torch.ops.aten._flash_attention_backward(
            gradient, query, key, value, out, whole, *offsets, *ctx.longest, 0.0, ctx.causal, random,
            torch.empty(0, device=query.device), **ctx.options,
        )  # fmt: skip
        share = (sinks.float()[:, None] - whole).exp()
        sink_gradient = -(share * (gradient.float() * out.float()).sum(-1).t()).sum(1)
        return *gradients, sink_gradient.to(sinks.dtype), None, None, None


def flash_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    lengths: Lengths,
    window: tuple[int, int],
    scale: float,
) -> torch.Tensor:
    """Flash attention of packed sequences with sinks, on a GPU in half precision: query [T, heads, d], key and value
    [K, kv_heads, d], sinks [heads] -> [T, heads, d].

    window: how many tokens before and after its own position a query attends to (-1: all); positions are aligned to
    the lower right corner.
    """
    return _Flash.apply(query, key, value, sinks, lengths, window, scale)
