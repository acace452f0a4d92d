"""Multi-head latent attention: DeepSeek-V2 and later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megarl.models.family import Attention, Hf
from megarl.models.tensors import TensorNames
from megarl.recipe.layout import Layout


@dataclass(frozen=True)
class MultiHeadLatentAttention(Attention):
    """Attention whose keys and values are projected from one small vector (latent) per token, which engines cache.

    DeepSeek-AI 2024, arXiv 2405.04434, section 2.1. The key of a head is a part of its own and a rotated part that all
    heads share.
    """

    rope_types = ("default", "yarn")

    def problems(self, hf: Hf) -> Iterator[str]:
        for name, only in (("attention_bias", False), ("rope_interleave", True)):
            if hf.get(name, only) != only:
                yield f"{name} = {hf[name]!r} is not supported for {hf['model_type']}, only {only!r}"
        if hf["v_head_dim"] > self.query_dim(hf):
            yield f"v_head_dim = {hf['v_head_dim']} is more than qk_nope_head_dim + qk_rope_head_dim"
        if (yarn := hf["rope_yarn"]) is not None:
            for name in ("mscale", "mscale_all_dim"):
                if not yarn.get(name):
                    yield f"rope_type 'yarn' needs {name}"
            if yarn.get("truncate", True) is not True:  # Megatron-Core's latent attention has no such setting
                yield f"rope truncate = {yarn['truncate']!r} is not supported for {hf['model_type']}, only True"

    @staticmethod
    def query_dim(hf: Hf) -> int:
        """Dimensions of one head of a query or key."""
        return int(hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"])

    def divided(self, hf: Hf) -> dict[str, int]:
        return {"num_attention_heads": hf["num_attention_heads"]}

    def megatron_settings(self, hf: Hf) -> dict[str, Any]:
        settings = dict(
            multi_latent_attention=True,
            num_attention_heads=hf["num_attention_heads"],
            num_query_groups=hf["num_attention_heads"],
            kv_channels=self.query_dim(hf),
            q_lora_rank=hf["q_lora_rank"],
            kv_lora_rank=hf["kv_lora_rank"],
            qk_head_dim=hf["qk_nope_head_dim"],
            qk_pos_emb_head_dim=hf["qk_rope_head_dim"],
            v_head_dim=hf["v_head_dim"],
            qk_layernorm=True,
            rope_type="rope",
            rotary_base=hf["rope_theta"],
            rotary_scaling_factor=1.0,
            mscale_all_dim=0.0,
        )
        yarn = hf["rope_yarn"]
        if yarn is not None:
            settings |= dict(
                rope_type="yarn",
                rotary_scaling_factor=yarn["factor"],
                original_max_position_embeddings=yarn["original_max_position_embeddings"],
                beta_fast=yarn.get("beta_fast") or 32,
                beta_slow=yarn.get("beta_slow") or 1,
                mscale=yarn["mscale"],
                mscale_all_dim=yarn["mscale_all_dim"],
            )
        return settings

    def tensors(self, hf: Hf) -> dict[str, TensorNames]:
        def one(name: str, split: int | None = None) -> TensorNames:
            return TensorNames((f"self_attn.{name}.weight",), split)

        tensors = {
            "input_layernorm.weight": TensorNames(("input_layernorm.weight",)),
            "self_attention.linear_proj.weight": one("o_proj", 1),
            "self_attention.linear_kv_down_proj.weight": one("kv_a_proj_with_mqa"),
            "self_attention.kv_layernorm.weight": one("kv_a_layernorm"),
            "self_attention.linear_kv_up_proj.weight": one("kv_b_proj", 0),
        }
        if hf["q_lora_rank"] is None:
            return tensors | {"self_attention.linear_q_proj.weight": one("q_proj", 0)}
        return tensors | {
            "self_attention.linear_q_down_proj.weight": one("q_a_proj"),
            "self_attention.q_layernorm.weight": one("q_a_layernorm"),
            "self_attention.linear_q_up_proj.weight": one("q_b_proj", 0),
        }

    def kept(self, hf: Hf, layout: Layout) -> float:
        width = self.query_dim(hf)
        # outputs of both down-projections, and the normalised latents
        latents = 2 * hf["kv_lora_rank"] + hf["qk_rope_head_dim"] + 2 * (hf["q_lora_rank"] or 0)
        # queries and outputs, padded to their width; log-sum-exp; keys and padded values of all context-parallel ranks
        head = 2 * width + hf["v_head_dim"] + 2 + 2 * layout.context_parallel * width
        return float(latents + hf["num_attention_heads"] * head)

    def cached_elements(self, hf: Hf, tensor_parallel: int) -> int:
        return int(hf["kv_lora_rank"] + hf["qk_rope_head_dim"])  # replicated on every rank

    def flops(self, hf: Hf, length: float) -> float:
        return float(hf["num_attention_heads"] * (self.query_dim(hf) + hf["v_head_dim"]) * length**2)
