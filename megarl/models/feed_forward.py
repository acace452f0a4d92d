"""The feed-forward half of a layer: a SwiGLU, or many of which a router chooses some for each token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megarl.models.family import Hf, Kept, tokens_between, tokens_inside
from megarl.models.tensors import TensorNames, down, gate_up
from megarl.recipe.layout import Layout

_NORM = {"pre_mlp_layernorm.weight": TensorNames(("post_attention_layernorm.weight",))}
# settings under which Megatron's model and the engine's would differ without an error
_ONLY = {"hidden_act": "silu", "mlp_bias": False}


def _problems(hf: Hf) -> Iterator[str]:
    for name, only in _ONLY.items():
        if hf.get(name, only) != only:
            yield f"{name} = {hf[name]!r} is not supported, only {only!r}"


class GatedMlp:
    """SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

    def problems(self, hf: Hf) -> Iterator[str]:
        return _problems(hf)

    def megatron_settings(self, hf: Hf) -> dict[str, Any]:
        return dict(ffn_hidden_size=hf["intermediate_size"], gated_linear_unit=True)

    def tensors(self, hf: Hf) -> dict[str, TensorNames]:
        return _NORM | {"mlp.linear_fc1.weight": gate_up("mlp"), "mlp.linear_fc2.weight": down("mlp")}

    def kept(self, hf: Hf, layout: Layout, tokens: int, imbalance: float) -> Kept:
        return Kept(tokens_inside(layout, tokens) * 5 * hf["intermediate_size"] / layout.tensor_parallel, 0.0)

    def expert_parameters(self, hf: Hf) -> int:
        return 0


class MixtureOfExperts:
    """SwiGLU experts, of which a linear router chooses the most probable for each token."""

    def problems(self, hf: Hf) -> Iterator[str]:
        return _problems(hf)

    def megatron_settings(self, hf: Hf) -> dict[str, Any]:
        return dict(
            ffn_hidden_size=hf["intermediate_size"],
            gated_linear_unit=True,
            num_moe_experts=hf["num_experts"],
            moe_router_topk=hf["num_experts_per_tok"],
            moe_ffn_hidden_size=hf["moe_intermediate_size"],
            moe_router_pre_softmax=not hf.get("norm_topk_prob", True),
        )

    def tensors(self, hf: Hf) -> dict[str, TensorNames]:
        return _NORM | {
            "mlp.router.weight": TensorNames(("mlp.gate.weight",)),
            "mlp.experts.linear_fc1.weight": gate_up("mlp.experts.{}"),
            "mlp.experts.linear_fc2.weight": down("mlp.experts.{}"),
        }

    def kept(self, hf: Hf, layout: Layout, tokens: int, imbalance: float) -> Kept:
        between = tokens_between(layout, tokens)
        routed = between * hf["num_experts_per_tok"] * layout.expert_tensor_parallel * imbalance
        width = hf["moe_intermediate_size"] / layout.expert_tensor_parallel
        return Kept(routed * (hf["hidden_size"] + 5 * width), between * hf["num_experts"])

    def expert_parameters(self, hf: Hf) -> int:
        return 3 * int(hf["hidden_size"]) * int(hf["moe_intermediate_size"])
