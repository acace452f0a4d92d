"""Multi-head latent attention in plain torch, over packed sequences.

Megatron-Core 0.16.1's torch-native form has two faults. With tensor parallelism it splits both down-projections and
gathers their outputs; the gradient of the rotated part of a key, to which the heads of all ranks contribute, is then
that of one rank's heads. And it reads lengths from the device in every layer. Here every rank has the whole
down-projections, as in Megatron's form for Transformer Engine, and tokens are rotated by their positions.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules, MultiLatentAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig

from megarl.actor.attention import PackedSequences, RMSNorm, rotate

if not isinstance(multi_latent_attention.TELinear, type):
    # without Transformer Engine, Megatron-Core 0.16.1 defines mocks of its classes, which this Megatron module takes
    # for the real ones
    multi_latent_attention.HAVE_TE = False

LATENT_EPSILON = 1e-6  # of the latents' norms, as in transformers 5.19, which ignores rms_norm_eps there


class WholeLinear(torch.nn.Linear):
    """A linear layer without bias, replicated on all tensor-parallel ranks; each applies it to its share of tokens."""

    def __init__(self, inputs: int, outputs: int, config: MLATransformerConfig) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)
        # makes Megatron all-reduce the gradient over tensor-parallel ranks
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LatentAttention(MultiLatentAttention):
    """Multi-head latent attention with Megatron's interface and parameter names."""

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        **more: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, attn_mask_type, "self", **more)
        heads, queries = config.num_attention_heads, config.num_attention_heads * self.q_head_dim
        if config.q_lora_rank is None:
            self.linear_q_proj = self._column_parallel(submodules.linear_q_proj, config.hidden_size, queries)
        else:
            self.linear_q_down_proj = WholeLinear(config.hidden_size, config.q_lora_rank, config)
            self.q_layernorm = RMSNorm(config, config.q_lora_rank, LATENT_EPSILON)
            self.linear_q_up_proj = self._column_parallel(submodules.linear_q_up_proj, config.q_lora_rank, queries)
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config.hidden_size, width, config)
        self.kv_layernorm = RMSNorm(config, config.kv_lora_rank, LATENT_EPSILON)
        self.linear_kv_up_proj = self._column_parallel(
            submodules.linear_kv_up_proj, config.kv_lora_rank, heads * (config.qk_head_dim + config.v_head_dim)
        )

    def _column_parallel(self, kind: Any, inputs: int, outputs: int) -> Any:
        return kind(
            inputs,
            outputs,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.tp_group,
        )

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T / tp, 1, hidden] -> queries and keys [T, heads, q_head_dim], values [T, heads, v_head_dim], the latents
        of queries and of keys and values."""
        assert packed_seq_params is not None and packed_seq_params.rotary is not None, "megarl packs every batch"
        config, heads, rotary = self.config, self.num_attention_heads_per_partition, packed_seq_params.rotary
        hidden = query_latent = hidden_states[:, 0]
        if config.q_lora_rank is None:
            query = self.linear_q_proj(hidden)[0]
        else:
            query_latent = self.q_layernorm(self.linear_q_down_proj(hidden))
            query = self.linear_q_up_proj(query_latent)[0]
        rotated = config.qk_pos_emb_head_dim
        latent, shared_key = self.linear_kv_down_proj(hidden).split([config.kv_lora_rank, rotated], -1)
        latent = self.kv_layernorm(latent)
        if config.sequence_parallel:  # the backward pass of the gather sums the gradients of all ranks' heads
            shared_key = gather_from_sequence_parallel_region(shared_key, group=self.tp_group)
        key_value = self.linear_kv_up_proj(latent)[0].view(-1, heads, config.qk_head_dim + config.v_head_dim)
        key, value = key_value.split([config.qk_head_dim, config.v_head_dim], -1)
        query, query_rotated = query.view(-1, heads, self.q_head_dim).split([config.qk_head_dim, rotated], -1)
        query = torch.cat([query, rotate(_halves(query_rotated), *rotary)], -1)
        shared_key = rotate(_halves(shared_key[:, None]), *rotary)
        return query, torch.cat([key, shared_key.expand(-1, heads, -1)], -1), value, query_latent, latent


def _halves(x: torch.Tensor) -> torch.Tensor:
    """Move the coordinates of pair i from (2 i, 2 i + 1), as DeepSeek's weights have them, to `rotate`'s two halves."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], -1)
