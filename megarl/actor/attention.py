"""Modules of a layer: RMSNorm that supports sequence parallelism, attention over packed sequences.

Megatron-Core's own `DotProductAttention` refuses packed sequences and `WrappedTorchNorm` refuses sequence parallelism;
Transformer Engine has both, but is not on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch.nn.attention.bias import causal_lower_right

from megarl.actor.delta_rule import SequenceChunks
from megarl.actor.flash import FlashAttention, Rows, SelectRows
from megarl.actor.sinks import causal_window, with_sink
from megarl.actor.transfer import to_device
from megarl.batch import ContextShard
from megarl.kernels.rms_norm import rms_norm
from megarl.kernels.short_attention import short_attention


@dataclass(frozen=True)
class Attended:
    """Which keys the queries of a micro-batch attend to: piece i has the queries ``cu_seqlens_q[i]`` to
    ``cu_seqlens_q[i + 1]`` and the keys ``cu_seqlens_k[i]`` to ``cu_seqlens_k[i + 1]``; its last query attends to all
    of these keys, each query before that to one key less."""

    queries: torch.Tensor | None  # [Q] int64, the queries' places on the packed axis; None: they are in its order
    keys: Rows | None  # [K] of the keys of all context-parallel ranks; None: likewise
    outputs: torch.Tensor | None  # [T] int64, which query's output belongs to each token; None: in order
    cu_seqlens_q: torch.Tensor  # [pieces + 1] int32
    cu_seqlens_k: torch.Tensor  # [pieces + 1] int32
    max_seqlen_q: int
    max_seqlen_k: int
    runs: tuple[tuple[int, int, int], ...]  # (count, queries, keys) of each run of consecutive pieces of equal size


def attended(
    pieces: Sequence[tuple[np.ndarray, np.ndarray]], tokens: int, total: int, device: torch.device
) -> Attended:
    """From the places of each piece's queries and keys; tokens: length of this rank's packed axis, total: of those of
    all context-parallel ranks.

    Every token is a query of some piece. If it is one of several, they have the same keys up to it.
    """
    queries, keys = (np.concatenate(part) for part in zip(*pieces, strict=True))
    q_sizes, k_sizes = (np.array([len(x) for x in part]) for part in zip(*pieces, strict=True))
    outputs = np.empty(tokens, np.int64)
    outputs[queries] = np.arange(len(queries))
    in_order = np.arange(tokens)

    def places(x: np.ndarray) -> torch.Tensor | None:
        return None if np.array_equal(x, in_order) else to_device(device, x)

    cu_seqlens_q = to_device(device, offsets(q_sizes))
    return Attended(
        queries=places(queries),
        keys=None if total == tokens and np.array_equal(keys, in_order) else Rows.of(keys, total, device),
        outputs=places(outputs),
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_q if np.array_equal(q_sizes, k_sizes) else to_device(device, offsets(k_sizes)),
        max_seqlen_q=int(q_sizes.max()),
        max_seqlen_k=int(k_sizes.max()),
        runs=tuple(
            (len(list(run)), *size) for size, run in groupby(zip(q_sizes.tolist(), k_sizes.tolist(), strict=True))
        ),
    )


def offsets(sizes: np.ndarray) -> np.ndarray:
    """[len(sizes) + 1] int32, cu_seqlens: where each packed sequence begins, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


@dataclass
class PackedSequences(PackedSeqParams):
    """Metadata of one packed micro-batch for every layer, computed once on the host.

    length_runs: (count, length) of each run of consecutive sequences of equal length; sequences are sorted by length.
    trained: [N] int64, indices on this rank's packed axis of response labels; the LM head is computed for these alone.
    """

    length_runs: tuple[tuple[int, int], ...] = ()
    trained: torch.Tensor | None = None
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None  # from `rotary_tables`, for the torch-native attention
    chunks: SequenceChunks | None = None  # of whole sequences, for layers with a recurrent state
    shard: ContextShard | None = None  # with context parallelism; all lengths are then those of whole padded sequences
    attended: Attended | None = None  # for the torch-native attention


def rotary_tables(
    positions: torch.Tensor, inverse_frequencies: torch.Tensor, dtype: torch.dtype, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines [T, 1, rotated dimensions] of each token's angles, for `rotate`; positions [1, T].

    inverse_frequencies: [rotated dimensions / 2]. scale: factor by which the rotation also scales a vector (YaRN).

    They are computed here once for all layers. Megatron-Core slices its own tables by sequence lengths that it reads
    from the device, for the queries and for the keys of every layer.
    """
    angles = positions[0, :, None, None].float() * inverse_frequencies.to(positions.device)
    cosines, sines = angles.cos(), angles.sin()
    if scale != 1:
        cosines, sines = cosines * scale, sines * scale
    cosines, sines = cosines.to(dtype), sines.to(dtype)
    return torch.cat([cosines, cosines], -1), torch.cat([-sines, sines], -1)


def rotate(x: torch.Tensor, cosines: torch.Tensor, signed_sines: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of x [T, heads, head_dim]; dimension i of the first half and of the second half are the
    two coordinates of pair i.

    Tables with fewer dimensions than a head rotate its first dimensions and leave the others as they are.
    """
    if (dims := cosines.shape[-1]) < x.shape[-1]:
        return torch.cat([rotate(x[..., :dims], cosines, signed_sines), x[..., dims:]], -1)
    return torch.addcmul(x * cosines, x.roll(x.shape[-1] // 2, -1), signed_sines)


class PackedAttention(MegatronModule):
    """Causal attention of each packed sequence over itself; [T, heads, head_dim] -> [T, heads * head_dim].

    It also applies the rotary embedding to queries and keys, except for latent attention, which has done so. Values may
    have fewer dimensions than keys. Nothing is computed for padding, and no [T, T] mask exists. On GPUs all sequences
    are one call of flash attention, which does not support float32; elsewhere each run of equally long sequences is one
    batched call, with a mask for one sequence where there are sinks or windows, or short ones are all one call.

    before: size of the sliding window: a token attends to itself and so many tokens before it; None: to all before it.
    softmax_offset: [heads], the logits of attention sinks, a parameter; None in models without sinks.
    """

    # "cpp": by `megarl.kernels.short_attention`; the same for all micro-batches, since its last bits are others
    backend: str = "torch"

    def __init__(
        self, config: TransformerConfig, layer_number: int = 1, softmax_scale: float | None = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.before = config.window_size[0] if windowed else None
        self.softmax_offset = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: torch.Tensor,  # [T, heads, head_dim]
        key: torch.Tensor,  # [T, kv_heads, head_dim]
        value: torch.Tensor,  # [T, kv_heads, head_dim]
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> torch.Tensor:
        assert packed_seq_params is not None and packed_seq_params.rotary is not None, "megarl packs every batch"
        if not self.config.multi_latent_attention:
            query, key = (rotate(x, *packed_seq_params.rotary) for x in (query, key))
        width = value.shape[-1]
        if (missing := key.shape[-1] - width) == 0:
            return self._attend(query, key, value, packed_seq_params)
        # torch's kernels want values as wide as keys
        attended = self._attend(query, key, F.pad(value, (0, missing)), packed_seq_params)
        return attended.view(-1, query.shape[1], key.shape[-1])[..., :width].flatten(1)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences
    ) -> torch.Tensor:
        pieces = packed.attended
        assert pieces is not None
        if packed.shard is not None:
            key, value = (gather_from_sequence_parallel_region(x, group=packed.shard.group) for x in (key, value))
        if self.backend == "cpp" and self.softmax_offset is self.before is None:
            keys = None if pieces.keys is None else pieces.keys.places
            lengths = pieces.cu_seqlens_q, pieces.cu_seqlens_k
            return short_attention(
                query, key, value, pieces.queries, keys, pieces.outputs, *lengths, self.scale
            ).flatten(1)
        if pieces.queries is not None:
            query = query.index_select(0, pieces.queries)
        attend = self._fused if query.is_cuda and query.dtype != torch.float32 else self._by_size
        out = attend(query, key, value, pieces)
        return out if pieces.outputs is None else out.index_select(0, pieces.outputs)

    def _by_size(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pieces: Attended) -> torch.Tensor:
        """One batched call for each run of pieces of equal size."""
        if pieces.keys is not None:
            key, value = (SelectRows.apply(x, pieces.keys) for x in (key, value))
        q_parts = query.split([count * queries for count, queries, _ in pieces.runs])
        k_parts, v_parts = (x.split([count * keys for count, _, keys in pieces.runs]) for x in (key, value))
        outputs = []
        for (count, *_), *parts in zip(pieces.runs, q_parts, k_parts, v_parts, strict=True):
            q, k, v = (x.view(count, -1, *x.shape[1:]).transpose(1, 2) for x in parts)
            outputs.append(self._dense(q, k, v).transpose(1, 2).flatten(0, 1).flatten(1))
        return torch.cat(outputs)

    def _dense(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Batched attention: query [n, heads, Q, head_dim], key and value [n, kv_heads, K, head_dim] -> as query.

        The causal mask is aligned to the lower right corner: the last query attends to all keys.
        """
        options: dict[str, Any] = dict(scale=self.scale, enable_gqa=True)
        queries, keys = query.shape[2], key.shape[2]
        if self.softmax_offset is None and self.before is None:
            options |= {"is_causal": True} if queries == keys else {"attn_mask": causal_lower_right(queries, keys)}
            return F.scaled_dot_product_attention(query, key, value, **options)
        mask = causal_window(queries, keys, self.before, query.device)
        if self.softmax_offset is None:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
        query, key, value = with_sink(query, key, value, self.softmax_offset / self.scale)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=F.pad(mask, (1, 0), value=True), **options)
        return out[..., :-1]

    def _fused(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pieces: Attended) -> torch.Tensor:
        """One call of flash attention, whose causal mask is aligned to the lower right corner."""
        lengths = (pieces.cu_seqlens_q, pieces.cu_seqlens_k, pieces.max_seqlen_q, pieces.max_seqlen_k)
        window = (-1 if self.before is None else self.before, 0)  # tokens before (-1: all) and after
        more = pieces.keys, self.softmax_offset, lengths, window, self.scale
        return FlashAttention.apply(query, key, value, *more).flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Megatron's contract, for the sinks: tensor parallelism divides them as it divides the heads."""
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm with Megatron's constructor, sequence parallelism and zero-centred weights (factor weight + 1)."""

    backend: str = "torch"  # of `megarl.kernels.rms_norm`

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # makes Megatron all-reduce the gradient over tensor-parallel ranks
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.zero_centred = config.layernorm_zero_centered_gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.eps is not None
        if not self.zero_centred:
            return rms_norm(x, self.weight, self.eps, self.backend)
        # in float32: in bfloat16 the sum weight + 1 would lose a small weight
        return rms_norm(x.float(), self.weight.float() + 1, self.eps, self.backend).to(x.dtype)
