"""Experts of gpt-oss: biases, a clamped activation, and all experts of a layer in transposed tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megarl.models.family import Hf, Keeping, Kept, tokens_between
from megarl.models.feed_forward import NORM, MixtureOfExperts
from megarl.models.tensors import TensorNames
from megarl.recipe.layout import Layout


@dataclass(frozen=True)
class ClampedExperts(MixtureOfExperts):
    """Experts with the activation (clamp(up) + 1) clamp(gate) sigmoid(1.702 clamp(gate)); router and projections have
    biases.

    OpenAI 2025, arXiv 2508.10925. Routing probabilities are a softmax over the logits of the chosen experts. The
    Hugging Face tensors are transposed (a row for each input), and columns of gate and up projection alternate.
    """

    undivided: bool = True

    def problems(self, hf: Hf) -> Iterator[str]:
        yield from super().problems(hf)
        if not hf["swiglu_limit"]:
            yield f"swiglu_limit = {hf['swiglu_limit']!r} must be more than 0"

    def megatron_settings(self, hf: Hf) -> dict[str, Any]:
        return super().megatron_settings(hf) | dict(
            add_bias_linear=True,
            activation_func="quick_gelu",
            activation_func_clamp_value=float(hf["swiglu_limit"]),
            glu_linear_offset=1.0,
        )

    def tensors(self, hf: Hf) -> dict[str, TensorNames]:
        def of_experts(name: str, split: int | None, packing: Any) -> TensorNames:
            return TensorNames((f"mlp.experts.{{}}.{name}",), split, packing)

        return NORM | {
            "mlp.router.weight": TensorNames(("mlp.router.weight",)),
            "mlp.router.bias": TensorNames(("mlp.router.bias",)),
            "mlp.experts.linear_fc1.weight": of_experts("gate_up_proj", 1, "alternate_columns"),
            "mlp.experts.linear_fc1.bias": of_experts("gate_up_proj_bias", 0, "alternate_columns"),
            "mlp.experts.linear_fc2.weight": of_experts("down_proj", 0, "columns"),
            "mlp.experts.linear_fc2.bias": of_experts("down_proj_bias", None, "columns"),
        }

    def kept(self, hf: Hf, layout: Layout, tokens: int, imbalance: float, how: Keeping) -> Kept:
        elements, float32, inputs = super().kept(hf, layout, tokens, imbalance, how)
        if "moe" in how.again:
            return Kept(elements, float32, inputs)
        between = tokens_between(layout, tokens)
        routed = between * hf["num_experts_per_tok"] * imbalance
        # in addition to a SwiGLU's: gate and up, clamped, and up with its offset; and the one-hot matrix of each row's
        # expert, once plain and once multiplied by the probabilities
        elements += routed * (3 * hf["moe_intermediate_size"] + 2 * hf["num_experts"] / layout.expert_parallel)
        return Kept(elements, float32, inputs)

    def expert_parameters(self, hf: Hf) -> int:
        biases = 2 * hf["moe_intermediate_size"] + hf["hidden_size"]
        return super().expert_parameters(hf) + int(biases)
