"""Attention with rotary positions and grouped key-value heads: Llama, Qwen2, Qwen3."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megarl.models.family import Hf, Kept, tokens_inside
from megarl.models.tensors import TensorNames
from megarl.recipe.layout import Layout


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Several query heads share a key-value head (Ainslie et al. 2023, arXiv 2305.13245)."""

    qk_norm: bool = False  # an RMSNorm over each head of the queries and of the keys
    qkv_bias: bool = False

    def problems(self, hf: Hf) -> Iterator[str]:
        if hf.get("use_sliding_window"):
            yield f"use_sliding_window = {hf['use_sliding_window']!r} is not supported, only False"
        if hf.get("attention_bias") and not self.qkv_bias:
            yield f"attention_bias = true is not supported for {hf['model_type']}"

    def megatron_settings(self, hf: Hf) -> dict[str, Any]:
        return dict(
            num_attention_heads=hf["num_attention_heads"],
            num_query_groups=hf["num_key_value_heads"],
            kv_channels=hf["head_dim"],
            qk_layernorm=self.qk_norm,
            add_qkv_bias=self.qkv_bias,
        )

    def tensors(self, hf: Hf) -> dict[str, TensorNames]:
        def fused(kind: str) -> TensorNames:
            return TensorNames(tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv"), 0, "query_groups")

        found = {
            "input_layernorm.weight": TensorNames(("input_layernorm.weight",)),
            "self_attention.linear_qkv.weight": fused("weight"),
            "self_attention.linear_proj.weight": TensorNames(("self_attn.o_proj.weight",), 1),
        }
        if self.qkv_bias:
            found["self_attention.linear_qkv.bias"] = fused("bias")
        if self.qk_norm:
            found["self_attention.q_layernorm.weight"] = TensorNames(("self_attn.q_norm.weight",))
            found["self_attention.k_layernorm.weight"] = TensorNames(("self_attn.k_norm.weight",))
        return found

    def kept(self, hf: Hf, layout: Layout, tokens: int) -> Kept:
        inside = tokens_inside(layout, tokens)
        heads = hf["num_attention_heads"] / layout.tensor_parallel
        query, key = heads * hf["head_dim"], hf["num_key_value_heads"] / layout.tensor_parallel * hf["head_dim"]
        # the fused projection; query and key with RoPE; the output of attention, twice
        elements = inside * ((query + 2 * key) + (query + key) + 2 * query)
        if self.qk_norm:
            elements += inside * query  # the norm of the queries wants them contiguous
        if layout.context_parallel > 1:
            elements += 2 * tokens * key  # keys and values of all ranks
        return Kept(elements, inside * heads)  # log-sum-exp

    def cached_elements(self, hf: Hf, tensor_parallel: int) -> int:
        heads = max(1, int(hf["num_key_value_heads"]) // tensor_parallel)  # a head is never split
        return 2 * heads * int(hf["head_dim"])

    def flops(self, hf: Hf, length: float) -> float:
        return float(2 * hf["num_attention_heads"] * hf["head_dim"] * length**2)
