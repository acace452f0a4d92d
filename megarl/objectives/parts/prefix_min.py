"""m_t, the smallest importance ratio in a token's prefix, in log space, also where ranks share sequences."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from megarl.batch import ContextShard, TokenBatch, segment_ids

_NONE = 0x7FFFFFFF  # key for "no trained token so far", above that of +infinity
_NAN = -1  # a NaN's bit pattern, whose key is the lowest of all


def prefix_min_log_ratio(l: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """[T] without gradient: log m_t, m_t = min over the earlier trained tokens of the response, 1 for the first.

    A NaN at a trained token makes log m_t NaN for every later token of the response, also on other ranks; untrained
    tokens have no effect. With a shard: one all-gather of [S, 2] minima.
    """
    least = _earlier_keys(l.detach().float(), batch)
    return torch.where(least == _NONE, 0.0, _from_key(least)).to(l.dtype)


def _earlier_keys(l: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """[T]: keys of the minimum of l [T] float32 over the earlier trained tokens of the response, _NONE for none.

    One cummin over integer keys that sort like the floats. The keys of a segment are lowered by segment * 2^32, below
    those of all earlier segments, so the minimum starts afresh in each.
    """
    ids = segment_ids(batch.segments, l.numel())
    offset = ids << 32
    inclusive = (torch.where(batch.loss_mask, _to_key(l), _NONE) - offset).cummin(0).values
    # on a segment's first token the minimum is from an earlier segment: the sum exceeds 2^31, and is clamped to _NONE
    exclusive = torch.cat([inclusive.new_full((1,), _NONE), inclusive])[:-1] + offset
    least = exclusive.clamp(max=_NONE)
    if batch.shard is None:
        return least
    before = min_of_earlier_chunks(segment_minima(l, batch).view(-1, 2), batch.shard).flatten()
    return torch.minimum(least, torch.where(before == math.inf, _NONE, _to_key(before))[ids])


def sum_at_minima(l: torch.Tensor, values: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """[T] float64 without gradient: for each token the sum of `values` [T] over the later tokens of the response whose
    m_t is its ratio; among equal ratios m_t is the first.

    This is the backward pass of m_t: if ``values`` are derivatives by log m_t, the sums are derivatives by the l of the
    tokens where the minima are. With a shard: two all-gathers of [S, 2] numbers.
    """
    l = l.detach().float() + 0.0  # turns -0.0, whose key is lower, into 0.0
    values = torch.where(batch.loss_mask, values.detach().double(), 0)
    boundaries, tokens = batch.segments.long(), values.numel()
    ids = segment_ids(boundaries, tokens)
    record = batch.loss_mask & (_to_key(l) < _earlier_keys(l, batch))
    index = torch.where(record, torch.arange(tokens, device=l.device), -1)
    latest = torch.cat([index.new_full((1,), -1), index]).cummax(0).values  # [T + 1], the last record before each place
    owner = latest[:-1]
    mine = owner >= boundaries[ids]  # the minimum is in this segment, not in an earlier one
    sums = values.new_zeros(tokens).index_add_(0, owner.clamp(min=0), torch.where(mine, values, 0))
    if batch.shard is None:
        return sums
    minima = segment_minima(l, batch)
    foreign = values.new_zeros(minima.numel()).index_add_(0, ids, torch.where(mine, 0, values))
    received = _from_later_chunks(foreign.view(-1, 2), minima.view(-1, 2), batch.shard).flatten()
    place = latest[boundaries[1:]]  # each chunk's minimum; used only if it is lower than all chunks before
    return sums.index_add_(0, place.clamp(min=0), received)


def _from_later_chunks(amounts: torch.Tensor, minima: torch.Tensor, shard: ContextShard) -> torch.Tensor:
    """[S, 2], sums of the amounts that later chunks send to each of this rank's chunks: a chunk sends its amount to the
    chunk that has the lowest of all minima before it, the first among equals. amounts, minima: [S, 2] of this rank's
    chunks. One all-gather."""
    sent = torch.stack([amounts, minima.double()], -1)
    gathered = [torch.empty_like(sent) for _ in range(shard.size)]
    dist.all_gather(gathered, sent, group=shard.group)
    amounts, minima = shard.in_order(torch.stack(gathered).transpose(1, 2)).unbind(-1)  # [chunks, S] each
    earlier = torch.cat([torch.full_like(minima[:1], math.inf), minima.cummin(0).values[:-1]])
    chunk = torch.arange(shard.chunks, device=minima.device)[:, None]
    holder = torch.where(minima < earlier, chunk, -1).cummax(0).values[:-1]  # chunk with the lowest minimum so far
    return torch.stack([torch.where(holder == held, amounts[1:], 0).sum(0) for held in shard.held], 1)


def segment_minima(l: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """[segments] float32: least l of the trained tokens of each sequence or, with a shard, of each chunk; inf for none,
    NaN if one is NaN."""
    ids = segment_ids(batch.segments, l.numel())
    minima = l.new_full((batch.segments.numel() - 1,), math.inf)
    return minima.scatter_reduce_(0, ids, torch.where(batch.loss_mask, l, math.inf), "amin")


def min_of_earlier_chunks(minima: torch.Tensor, shard: ContextShard) -> torch.Tensor:
    """Minima [S, 2] of this rank's two chunks of each sequence -> [S, 2], for each of them the minimum of all chunks
    before it; inf for none, NaN if one of them is NaN. One all-gather."""
    gathered = [torch.empty_like(minima) for _ in range(shard.size)]
    dist.all_gather(gathered, minima.contiguous(), group=shard.group)
    in_order = shard.in_order(torch.stack(gathered).transpose(1, 2))  # [chunks, S]
    before = torch.cat([torch.full_like(in_order[:1], math.inf), in_order.cummin(0).values[:-1]])
    return torch.stack([before[chunk] for chunk in shard.held], 1)


def _to_key(values: torch.Tensor) -> torch.Tensor:
    """float32 -> int64 in [-2^31, 2^31) that sorts like it; NaN is the lowest, -0.0 just below 0.0."""
    bits = torch.where(values.isnan(), _NAN, values.contiguous().view(torch.int32))
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()


def _from_key(keys: torch.Tensor) -> torch.Tensor:
    keys = keys.int()
    return torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys).view(torch.float32)
