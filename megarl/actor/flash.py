"""Flash attention of packed sequences on a GPU in half precision, with gathered keys and with attention sinks.

**Gathered keys.** Where keys belong to several pieces (a prompt's to all responses of its group, or those of other
context-parallel ranks) the kernel needs a copy for each. Only the rows themselves are kept for the backward pass, which
gathers them again.

**Sinks** (`megarl.actor.sinks`). With the log-sum-exp L over the keys and the sink s, the output without the sink is
multiplied by sigmoid(L - s). Gradients are those of plain attention for the output and the log-sum-exp that include the
sink, log(exp(L) + exp(s)), so flash attention's own backward pass computes them when it is given these two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from megarl.actor.transfer import to_device

Lengths = tuple[torch.Tensor, torch.Tensor, int, int]  # cu_seqlens of queries and of keys, max_seqlen of both


@dataclass(frozen=True)
class Rows:
    """K rows of a tensor with N, some of them several times."""

    places: torch.Tensor  # [K] int64
    copies: torch.Tensor  # [K] int64, where each row of the tensor is among ``places``, for one row after another
    offsets: torch.Tensor  # [N] int64, where those of each row begin in ``copies``

    @classmethod
    def of(cls, places: np.ndarray, rows: int, device: torch.device) -> Rows:
        counts = np.bincount(places, minlength=rows)
        columns = places, places.argsort(kind="stable"), counts.cumsum() - counts
        return cls(*(to_device(device, x) for x in columns))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, self.places)

    def sum(self, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient of `gather`'s input from that of its output, by one kernel that accumulates in float32."""
        sums = F.embedding_bag(self.copies, gradient.flatten(1), self.offsets, mode="sum")
        return sums.view(-1, *gradient.shape[1:])


class SelectRows(torch.autograd.Function):
    """x.index_select(0, rows.places); the gradient of a prompt's row is the sum over all responses of its group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.rows = rows
        return rows.gather(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.rows.sum(gradient), None


class FlashAttention(torch.autograd.Function):
    """query [T, heads, d], key and value [N, kv_heads, d], sinks [heads] -> [T, heads, d].

    lengths: of the pieces, whose keys are the ``rows`` of ``key`` and ``value``, None: all in order. window: how many
    tokens before and after its own position a query attends to (-1: all); positions are aligned to the lower right
    corner of a piece. Calls the same operators as `torch.nn.attention.varlen` of torch 2.13.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: Rows | None,
        sinks: torch.Tensor | None,
        lengths: Lengths,
        window: tuple[int, int],
        scale: float,
    ) -> torch.Tensor:
        options = dict(scale=scale, window_size_left=window[0], window_size_right=window[1])
        ctx.rows, ctx.longest, ctx.causal, ctx.options = rows, lengths[2:], window == (-1, 0), options
        keys = (key, value) if rows is None else (rows.gather(key), rows.gather(value))
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, *keys, *lengths, 0.0, ctx.causal, return_debug_mask=False, **options
        )
        if sinks is not None:
            whole = torch.logaddexp(lse, sinks.float()[:, None])  # [heads, T], log-sum-exp with the sink
            out, lse = (out * (lse - whole).exp().t()[..., None]).to(query.dtype), whole
        ctx.save_for_backward(query, key, value, out, lse, sinks, *lengths[:2])
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse, sinks, *offsets = ctx.saved_tensors
        gradient, rows, sink_gradient = gradient.contiguous(), ctx.rows, None
        keys = (key, value) if rows is None else (rows.gather(key), rows.gather(value))
        random = torch.zeros(2, dtype=torch.uint64, device=query.device)  # state for dropout, which is not used
        for_query, *for_keys = torch.ops.aten._flash_attention_backward(
            gradient, query, *keys, out, lse, *offsets, *ctx.longest, 0.0, ctx.causal, random,
            torch.empty(0, device=query.device), **ctx.options,
        )  # fmt: skip
        if rows is not None:
            for_keys = [rows.sum(x) for x in for_keys]
        if sinks is not None:
            share = (sinks.float()[:, None] - lse).exp()
            sink_gradient = -(share * (gradient.float() * out.float()).sum(-1).t()).sum(1).to(sinks.dtype)
        return for_query, *for_keys, None, sink_gradient, None, None, None
