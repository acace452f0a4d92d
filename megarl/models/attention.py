"""Attention with rotary positions and grouped key-value heads, as most families have it; with sinks, as gpt-oss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from megarl.models.family import Attention, Hf
from megarl.models.tensors import TensorNames
from megarl.recipe.layout import Layout

_LAYER_TYPES = ("sliding_attention", "full_attention")  # as config.json calls them


@dataclass(frozen=True)
class GroupedQueryAttention(Attention):
    """Several query heads share a key-value head (Ainslie et al. 2023, arXiv 2305.13245).

    qk_norm: an RMSNorm of the queries and one of the keys, over each head or over all heads of a token.
    qk_norm_if, qkv_bias_if: setting of config.json that turns the norm or the bias on or off; None: always on.
    partial_rotary: whether config.json may ask that only a part of each head is rotated.
    output_gate: a head's output is multiplied by the sigmoid of a second part of its query's projection (Qiu et al.
        2025, arXiv 2505.06708).
    """

    qk_norm: Literal["none", "head", "all heads"] = "none"
    qk_norm_if: str | None = None
    qkv_bias: bool = False
    qkv_bias_if: str | None = None
    partial_rotary: bool = False
    output_gate: bool = False
    rope_types: tuple[str, ...] = ("default", "llama3")

    @property
    def norms_all_heads(self) -> bool:
        return self.qk_norm == "all heads"

    def norms(self, hf: Hf) -> bool:
        """Whether queries and keys are normalised."""
        return self.qk_norm != "none" and (self.qk_norm_if is None or bool(hf[self.qk_norm_if]))

    def biases(self, hf: Hf) -> bool:
        """Whether queries, keys and values have biases."""
        return self.qkv_bias and (self.qkv_bias_if is None or bool(hf[self.qkv_bias_if]))

    def problems(self, hf: Hf) -> Iterator[str]:
        if hf.get("use_sliding_window"):
            yield f"use_sliding_window = {hf['use_sliding_window']!r} is not supported, only False"
        if hf.get("attention_bias") and not self.qkv_bias:
            yield f"attention_bias = true is not supported for {hf['model_type']}"

    def divided(self, hf: Hf) -> dict[str, int]:
        return {name: hf[name] for name in ("num_attention_heads", "num_key_value_heads")}

    def megatron_settings(self, hf: Hf) -> dict[str, Any]:
        return dict(
            num_attention_heads=hf["num_attention_heads"],
            num_query_groups=hf["num_key_value_heads"],
            kv_channels=hf["head_dim"],
            # a norm over all heads is not Megatron's own: Megatron would sum the gradients over tensor-parallel ranks,
            # which divide this norm's weight
            qk_layernorm=self.norms(hf) and not self.norms_all_heads,
            add_qkv_bias=self.biases(hf),
            attention_output_gate=self.output_gate,
        )

    def tensors(self, hf: Hf) -> dict[str, TensorNames]:
        def fused(kind: str) -> TensorNames:
            # Megatron arranges the rows by groups of query heads that share a key-value head
            group = (hf["num_attention_heads"] // hf["num_key_value_heads"] * hf["head_dim"], *[hf["head_dim"]] * 2)
            packing: Any = "gated_groups" if self.output_gate else "groups"
            return TensorNames(tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv"), 0, packing, group)

        tensors = {
            "input_layernorm.weight": TensorNames(("input_layernorm.weight",)),
            "self_attention.linear_qkv.weight": fused("weight"),
            "self_attention.linear_proj.weight": TensorNames(("self_attn.o_proj.weight",), 1),
        }
        if self.biases(hf):
            tensors["self_attention.linear_qkv.bias"] = fused("bias")
        if self.norms(hf):
            split = 0 if self.norms_all_heads else None
            tensors["self_attention.q_layernorm.weight"] = TensorNames(("self_attn.q_norm.weight",), split)
            tensors["self_attention.k_layernorm.weight"] = TensorNames(("self_attn.k_norm.weight",), split)
        return tensors

    def kept(self, hf: Hf, layout: Layout) -> float:
        heads, groups, width = hf["num_attention_heads"], hf["num_key_value_heads"], hf["head_dim"]
        query, key = heads * width, groups * width
        # the fused projection; rotated queries and attention's output; keys and values of all context-parallel ranks
        ranks = layout.context_parallel
        elements = 3 * query + 2 * key + (1 + (ranks > 1)) * ranks * key
        if self.norms_all_heads:  # normalised queries and keys before the weight, and in float32
            elements += 3 * (query + key)
        elif self.norms(hf):  # contiguous queries; the zero-centred norms of gated heads are in float32
            elements += 2 * (query + key) if self.output_gate else query
        # log-sum-exp and statistics of norms; the gate, its sigmoid in float32, and the gated output
        return float(elements + 6 * heads + 4 * query * self.output_gate)

    def cached_elements(self, hf: Hf, tensor_parallel: int) -> int:
        heads = max(1, int(hf["num_key_value_heads"]) // tensor_parallel)  # a head is replicated, never split
        return 2 * heads * int(hf["head_dim"])

    def flops(self, hf: Hf, length: float) -> float:
        return float(2 * hf["num_attention_heads"] * hf["head_dim"] * length**2)


@dataclass(frozen=True)
class SinkAttention(GroupedQueryAttention):
    """Attention of gpt-oss (OpenAI 2025, arXiv 2508.10925), whose projections all have biases.

    The softmax of a head includes one more logit, a parameter, without a value. In layers with a window a token attends
    to the last ``sliding_window`` tokens, itself included.
    """

    qkv_bias: bool = True
    rope_types: tuple[str, ...] = ("default", "yarn")

    def problems(self, hf: Hf) -> Iterator[str]:
        yield from super().problems(hf)
        types = hf.get("layer_types")
        if types is not None and (len(types) != hf["num_hidden_layers"] or set(types) - set(_LAYER_TYPES)):
            yield f"layer_types = {types!r} must name one of {', '.join(_LAYER_TYPES)} for each of the layers"

        if hf["sliding_window"] is not None and hf["sliding_window"] < 1:
            yield f"sliding_window = {hf['sliding_window']} must be 1 or more"

    def window(self, hf: Hf, layer: int) -> int | None:
        types = hf.get("layer_types")
        kind = types[layer] if types is not None else _LAYER_TYPES[layer % 2]
        return int(hf["sliding_window"]) if kind == _LAYER_TYPES[0] and hf["sliding_window"] is not None else None

    def megatron_settings(self, hf: Hf) -> dict[str, Any]:
        settings = super().megatron_settings(hf) | dict(add_bias_linear=True, softmax_type="learnable")
        windows = [self.window(hf, layer) for layer in range(hf["num_hidden_layers"])]
        if any(windows):
            settings |= dict(
                window_size=(hf["sliding_window"] - 1, 0), window_attn_skip_freq=[int(bool(w)) for w in windows]
            )
        return settings

    def tensors(self, hf: Hf) -> dict[str, TensorNames]:
        return super().tensors(hf) | {
            "self_attention.linear_proj.bias": TensorNames(("self_attn.o_proj.bias",)),
            "self_attention.core_attention.softmax_offset": TensorNames(("self_attn.sinks",), 0),
        }
