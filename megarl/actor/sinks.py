"""Attention with sinks: each head has one more logit in its softmax, to which no value belongs (arXiv 2508.10925).

Here as masks and vectors for plain attention; for flash attention: `megarl.actor.flash`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


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
