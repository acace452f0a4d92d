"""Sends tokens to their experts and back with indices and counts that stay on the device.

Megatron-Core's dispatcher waits for the device several times a layer: for the size of what ``masked_select`` returns,
and for the counts by which it splits tensors. Here all tensor sizes are known in advance, since every token has
``moe_router_topk`` experts. Only the exchange between ranks needs counts on the host: one wait a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.kernels.row_sums import row_sums


class IndexDispatcher(MoETokenDispatcher):
    """A token dispatcher with Megatron's interface; it orders tokens as Megatron's all-to-all dispatcher does.

    A row is one (token, chosen expert) pair: t tokens have t top_k rows."""

    def __init__(
        self, local_expert_indices: Sequence[int], config: TransformerConfig, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.local = slice(local_expert_indices[0], local_expert_indices[-1] + 1)
        self.exchanges = self.tp_size * self.ep_size > 1
        self.backend = "torch"  # of `megarl.kernels.row_sums`; `build_model` chooses it

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens -> rows sorted by expert: [..., hidden] -> [t top_k, hidden], probs [t, experts] -> [t top_k]."""
        self.hidden_shape, self.probs_dtype = hidden_states.shape, probs.dtype
        self.tokens_per_expert = routing_map.sum(0)
        if self.exchanges:
            self._start_exchange_of_counts()
        experts, top_k = routing_map.shape[1], self.config.moe_router_topk
        pairs = torch.nonzero_static(routing_map.flatten(), size=routing_map.shape[0] * top_k)[:, 0]
        order = (pairs % experts).argsort(stable=True)
        pairs = pairs[order]
        self.tokens = (pairs // experts)[:, None]  # row -> its token
        self.rows = _inverse(order).view(-1, top_k)  # token -> its rows
        hidden = hidden_states.view(-1, self.hidden_shape[-1])
        return gather_rows(hidden, self.tokens, self.rows, self.backend), probs.flatten().index_select(0, pairs)

    def _start_exchange_of_counts(self) -> None:
        """Share the counts of rows that each rank sends to each expert, and start to copy the totals to the host."""
        everyone = self.tokens_per_expert.new_empty(self.tp_ep_group.size() * len(self.tokens_per_expert))
        dist.all_gather_into_tensor(everyone, self.tokens_per_expert, group=self.tp_ep_group)
        counts = everyone.view(self.ep_size, self.tp_size, -1).transpose(0, 1)  # [tp, ep, experts], rows by sender
        received = counts[:, :, self.local]
        sent = self.tokens_per_expert.view(self.ep_size, -1).sum(1)
        from_rank = received.sum(2)
        self.chunks = received.flatten(0, 1)  # [tp ep, local experts], lengths in the order in which rows arrive
        self.tokens_per_expert = self.chunks.sum(0)
        totals = torch.cat([sent, from_rank[self.tp_rank], from_rank.sum(1)])
        self.totals = totals.to("cpu", non_blocking=True)  # torch makes the target pinned memory
        self.copied = torch.cuda.current_stream().record_event() if totals.is_cuda else None

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All-to-all of the rows between expert-parallel ranks; the layer's only wait for the device is here."""
        if not self.exchanges:
            return hidden_states, probs
        if self.copied is not None:
            self.copied.synchronize()
        totals, ep = self.totals.tolist(), self.ep_size
        self.sent, self.received, self.from_tp = totals[:ep], totals[ep : 2 * ep], totals[2 * ep :]
        arrived = (all_to_all(self.ep_group, x, self.received, self.sent) for x in (hidden_states, probs))
        return next(arrived), next(arrived)

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows for this rank's experts from all ranks, sorted by expert, their number for each, their probs."""
        if self.tp_size > 1:
            hidden_states, probs = (
                gather_from_sequence_parallel_region(x, group=self.tp_group, output_split_sizes=self.from_tp)
                for x in (hidden_states, probs)
            )
        if self._sorts_again():
            self.arrival = chunk_order(self.chunks, len(hidden_states))
            self.sorted_place = _inverse(self.arrival)
            hidden_states = gather_rows(hidden_states, self.arrival[:, None], self.sorted_place[:, None])
            probs = probs.index_select(0, self.arrival)
        return hidden_states, self.tokens_per_expert, probs

    def _sorts_again(self) -> bool:
        return self.exchanges and self.chunks.shape[1] > 1

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Experts' outputs in the order in which the rows arrived, summed over the ranks that share an expert."""
        if self._sorts_again():
            hidden_states = gather_rows(hidden_states, self.sorted_place[:, None], self.arrival[:, None])
        if self.tp_size > 1:
            dtype = hidden_states.dtype
            hidden_states = reduce_scatter_to_sequence_parallel_region(
                hidden_states.to(self.probs_dtype), group=self.tp_group, input_split_sizes=self.from_tp
            ).to(dtype)
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """All-to-all of the outputs back to the ranks of their tokens."""
        if self.exchanges:
            hidden_states = all_to_all(self.ep_group, hidden_states, self.sent, self.received)
        return hidden_states

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sum the rows of each token: [t top_k, hidden] -> [..., hidden]."""
        return gather_rows(hidden_states, self.rows, self.tokens, self.backend).view(self.hidden_shape)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, backend: str
    ) -> torch.Tensor:
        ctx.save_for_backward(targets)
        ctx.backend = backend
        return row_sums(rows, sources, backend)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return row_sums(gradient, ctx.saved_tensors[0], ctx.backend), None, None, None


def gather_rows(
    rows: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, backend: str = "torch"
) -> torch.Tensor:
    """`row_sums(rows, sources)`. targets: the inverse relation, ``targets[k]`` are all i whose sum includes row k; the
    backward pass sums over them, without atomic additions.
    """
    return _GatherRows.apply(rows, sources, targets, backend)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes ``order``."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def chunk_order(chunks: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows] int64, the permutation that brings chunks of rows from rank-major order, in which they arrive, to
    expert-major order: row i of the result is row ``order[i]`` of the input.

    chunks: [ranks, experts], the length of each chunk, on the device; rows: their sum, on the host.
    """
    begin = (chunks.flatten().cumsum(0) - chunks.flatten()).view_as(chunks).t().flatten()  # in the arriving order
    lengths = chunks.t().flatten()
    shift = begin - (lengths.cumsum(0) - lengths)
    return torch.arange(rows, device=chunks.device) + shift.repeat_interleave(lengths, output_size=rows)


class RoutedExperts(MoELayer):
    """Megatron's MoE layer, with `IndexDispatcher` unless Transformer Engine permutes the rows."""

    parts: MoESubmodules

    def __init__(self, config: TransformerConfig, **_: Any) -> None:  # 0.19 also passes groups: the default ones
        groups = get_default_pg_collection()
        super().__init__(config, self.parts, pg_collection=groups)
        if not config.moe_permute_fusion:
            self.token_dispatcher = IndexDispatcher(self.local_expert_indices, config, groups)


def routed_experts(submodules: MoESubmodules) -> type[RoutedExperts]:
    """`RoutedExperts` as a class that Megatron can build from a configuration alone.

    Given a ModuleSpec instead, Megatron-Core 0.16.1 expects one of its own classes and warns once a layer.
    """

    return type("Layer", (RoutedExperts,), {"parts": submodules})
