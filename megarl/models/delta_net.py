"""The gated delta net: linear attention, whose state of fixed size takes the place of keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megarl.models.family import Attention, Hf
from megarl.models.tensors import TensorNames
from megarl.recipe.layout import Layout

CHUNK = 64  # number of tokens whose contributions to the state are computed together
SIZES = {  # settings that Megatron calls as config.json does, with transformers' defaults
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}


@dataclass(frozen=True)
class GatedDeltaNet(Attention):
    """Yang et al. 2024, arXiv 2412.06464, as in Qwen3-Next: several value heads share a key head.

    separate: the Hugging Face model has one projection for queries, keys and values of all heads, and one each for
        gates, rates and decays; otherwise it has Qwen3-Next's two, interleaved by key head.
    """

    separate: bool = False

    def problems(self, hf: Hf) -> Iterator[str]:
        if hf["linear_num_value_heads"] % hf["linear_num_key_heads"]:
            yield (
                f"linear_num_value_heads = {hf['linear_num_value_heads']} is no multiple of linear_num_key_heads = "
                f"{hf['linear_num_key_heads']}"
            )

    def divided(self, hf: Hf) -> dict[str, int]:
        return {"linear_num_key_heads": hf["linear_num_key_heads"]}

    def megatron_settings(self, hf: Hf) -> dict[str, Any]:
        return {name: hf[name] for name in SIZES}

    def tensors(self, hf: Hf) -> dict[str, TensorNames]:
        def one(name: str, split: int | None = None) -> TensorNames:
            return TensorNames((f"linear_attn.{name}",), split)

        projections = {
            "self_attention.in_proj_qkvz.weight": one("in_proj_qkvz.weight", 0),
            "self_attention.in_proj_ba.weight": one("in_proj_ba.weight", 0),
        }
        return {
            "input_layernorm.weight": TensorNames(("input_layernorm.weight",)),
            **(self._separate_projections(hf) if self.separate else projections),
            # replicated: its rows are the queries, then keys, then values of all heads, so a shard is no single slice
            "self_attention.conv1d.weight": one("conv1d.weight"),
            "self_attention.A_log": one("A_log", 0),
            "self_attention.dt_bias": one("dt_bias", 0),
            "self_attention.norm.weight": one("norm.weight"),
            "self_attention.out_proj.weight": one("out_proj.weight", 1),
        }

    def _separate_projections(self, hf: Hf) -> dict[str, TensorNames]:
        """The same parameters where each tensor, or range of its rows, has one kind of row for all heads."""
        width, heads = hf["linear_key_head_dim"], hf["linear_num_key_heads"]
        shared_by = hf["linear_num_value_heads"] // heads
        values = shared_by * hf["linear_value_head_dim"]  # rows of values for each key head
        ends = [heads * width, 2 * heads * width, heads * (2 * width + values)]
        query_rows, key_rows, value_rows = (
            f"linear_attn.in_proj_qkv.weight[{first}:{end}:{ends[-1]}]" for first, end in pairwise([0, *ends])
        )
        gates, rates, decays = (f"linear_attn.in_proj_{name}.weight" for name in "zba")
        return {
            "self_attention.in_proj_qkvz.weight": TensorNames(
                (query_rows, key_rows, value_rows, gates), 0, "groups", (width, width, values, values)
            ),
            "self_attention.in_proj_ba.weight": TensorNames((rates, decays), 0, "groups", (shared_by, shared_by)),
        }

    def kept(self, hf: Hf, layout: Layout) -> float:
        heads, width = hf["linear_num_value_heads"], hf["linear_key_head_dim"]
        keys, values = hf["linear_num_key_heads"] * width, heads * hf["linear_value_head_dim"]
        # input and output of the convolution; output of the rule, normalised, and gated; rates
        elements = 2 * (2 * keys + values) + 3 * values + heads
        # queries and keys before they are normalised; gates and their activation
        float32 = 2 * keys + 2 * values
        # in `megarl.actor.delta_rule`: six tensors of the size of the keys (repeated for each value head), three of the
        # values, five matrices [CHUNK, CHUNK], the states between chunks, and a few numbers per head
        float32 += heads * (6 * width + 5 * CHUNK + width * hf["linear_value_head_dim"] / CHUNK + 8) + 3 * values
        # each tensor-parallel rank gathers the input
        return float(elements + 2 * float32 + (layout.tensor_parallel - 1) * hf["hidden_size"])

    def state_elements(self, hf: Hf, tensor_parallel: int) -> float:
        heads, width = hf["linear_num_value_heads"], hf["linear_key_head_dim"]
        channels = 2 * hf["linear_num_key_heads"] * width + heads * hf["linear_value_head_dim"]
        states = heads * width * hf["linear_value_head_dim"] + channels * (hf["linear_conv_kernel_dim"] - 1)
        return float(states / tensor_parallel)
