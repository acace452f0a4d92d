"""The feed-forward sublayer of a layer: one SwiGLU, or a mixture of experts, each a SwiGLU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megarl.models.family import FeedForward, Hf
from megarl.models.tensors import TensorNames, down, gate_up
from megarl.recipe.layout import Layout

NORM = {"pre_mlp_layernorm.weight": TensorNames(("post_attention_layernorm.weight",))}
# the only supported values: with others Megatron's model would silently differ from the engine's
_ONLY = {"hidden_act": "silu", "mlp_bias": False}


def _problems(hf: Hf) -> Iterator[str]:
    for name, only in _ONLY.items():
        if hf.get(name, only) != only:
            yield f"{name} = {hf[name]!r} is not supported, only {only!r}"


# elements that torch-native layers keep of a SwiGLU for each of its outputs: gate, up, two intermediate results, and
# the output itself, which the next matrix reads
_SWIGLU = 5


class GatedMlp(FeedForward):
    """A dense SwiGLU (Shazeer 2020, arXiv 2002.05202)."""

    undivided = False

    def problems(self, hf: Hf) -> Iterator[str]:
        return _problems(hf)

    def divided(self, hf: Hf) -> dict[str, int]:
        return {"intermediate_size": hf["intermediate_size"]}

    def megatron_settings(self, hf: Hf) -> dict[str, Any]:
        return dict(ffn_hidden_size=hf["intermediate_size"], gated_linear_unit=True)

    def tensors(self, hf: Hf) -> dict[str, TensorNames]:
        return NORM | {"mlp.linear_fc1.weight": gate_up("mlp"), "mlp.linear_fc2.weight": down("mlp")}

    def kept(self, hf: Hf, layout: Layout, imbalance: float, again: frozenset[str]) -> float:
        return 0.0 if "mlp" in again else float(_SWIGLU * hf["intermediate_size"])

    def repeated_width(self, hf: Hf, again: frozenset[str]) -> int:
        return int(hf["intermediate_size"]) if "mlp" in again else 0


@dataclass(frozen=True)
class MixtureOfExperts(FeedForward):
    """SwiGLU experts, of which a linear router chooses some for each token.

    sigmoid: the router's scores are sigmoids, normalised over the chosen experts, and each expert has a bias that
        affects only the choice (DeepSeek-AI 2024, arXiv 2412.19437, section 2.1.2). The bias is not trained and is
        exported unchanged. Otherwise the scores are a softmax.
    grouped: whether config.json may divide the experts of sigmoid routing into groups.
    module, matrices, bias: Hugging Face names of the experts' module, and in it of an expert's gate, up and down
        projection, and of the bias.
    shared, shared_gate: Hugging Face names of the module of the shared expert, which every token uses, and of the
        weight of its gate; None if there is none.
    undivided: as `FeedForward.undivided`.
    """

    sigmoid: bool = False
    grouped: bool = True
    module: str = "mlp"
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    bias: str = "gate.e_score_correction_bias"
    shared: str | None = None
    shared_gate: str | None = None
    undivided: bool = False

    def shared_width(self, hf: Hf) -> int:
        """Width of the shared expert, several being one wide expert; 0 if there is none."""
        if self.shared is None:
            return 0
        if "n_shared_experts" in hf:
            return int(hf["moe_intermediate_size"] * (hf["n_shared_experts"] or 0))
        return int(hf["shared_expert_intermediate_size"])

    def _groups(self, hf: Hf) -> tuple[int, int] | None:
        """(number of expert groups, number of groups that a token may use); None if it may use all of them."""
        if not (self.sigmoid and self.grouped):
            return None
        groups, chosen = hf["n_group"] or 1, hf["topk_group"] or 1
        return (groups, chosen) if chosen < groups else None

    def problems(self, hf: Hf) -> Iterator[str]:
        yield from _problems(hf)
        if not hf["num_experts"]:
            yield f"the number of experts is missing, which a {hf['model_type']} needs"
        if not self.sigmoid:
            return
        per_token = hf["num_experts_per_tok"]
        if not hf["norm_topk_prob"] or per_token == 1:
            yield (
                f"norm_topk_prob = {hf['norm_topk_prob']} with num_experts_per_tok = {per_token}: Megatron-Core "
                "normalises sigmoid scores if and only if a token uses several experts"
            )
        if (groups := self._groups(hf)) and per_token // groups[1] != 2:
            yield (
                f"num_experts_per_tok = {per_token} with topk_group = {groups[1]}: a group's score is the sum of its "
                "two best experts, but Megatron-Core adds up num_experts_per_tok / topk_group of them"
            )

    def divided(self, hf: Hf) -> dict[str, int]:
        width = self.shared_width(hf)
        return {"width of its shared experts": width} if width else {}

    def megatron_settings(self, hf: Hf) -> dict[str, Any]:
        settings = dict(
            ffn_hidden_size=hf["intermediate_size"],
            gated_linear_unit=True,
            num_moe_experts=hf["num_experts"],
            moe_router_topk=hf["num_experts_per_tok"],
            moe_ffn_hidden_size=hf["moe_intermediate_size"],
        )
        if width := self.shared_width(hf):
            settings |= dict(
                moe_shared_expert_intermediate_size=width, moe_shared_expert_gate=self.shared_gate is not None
            )
        if not self.sigmoid:
            return settings | dict(moe_router_pre_softmax=not hf["norm_topk_prob"])
        if groups := self._groups(hf):
            settings |= dict(moe_router_num_groups=groups[0], moe_router_group_topk=groups[1])
        return settings | dict(
            moe_router_score_function="sigmoid",
            moe_router_topk_scaling_factor=float(hf["routed_scaling_factor"]),
            moe_router_enable_expert_bias=True,
            moe_router_bias_update_rate=0.0,
        )

    def tensors(self, hf: Hf) -> dict[str, TensorNames]:
        module, (gate, up, down_) = self.module, self.matrices
        expert = f"{module}.experts.{{}}"
        tensors = {
            "mlp.router.weight": TensorNames((f"{module}.gate.weight",)),
            "mlp.experts.linear_fc1.weight": TensorNames((f"{expert}.{gate}.weight", f"{expert}.{up}.weight"), 0),
            "mlp.experts.linear_fc2.weight": TensorNames((f"{expert}.{down_}.weight",), 1),
        }
        if self.sigmoid:
            tensors["mlp.router.expert_bias"] = TensorNames((f"{module}.{self.bias}",))
        if self.shared is not None and self.shared_width(hf):
            tensors["mlp.shared_experts.linear_fc1.weight"] = gate_up(self.shared)
            tensors["mlp.shared_experts.linear_fc2.weight"] = down(self.shared)
            if self.shared_gate is not None:
                tensors["mlp.shared_experts.gate_weight"] = TensorNames((self.shared_gate,))
        return NORM | tensors

    def kept(self, hf: Hf, layout: Layout, imbalance: float, again: frozenset[str]) -> float:
        if "moe" in again:
            return 0.0
        routed = hf["num_experts_per_tok"] * imbalance
        # an expert's part on each rank reads the whole token, of which the exchange keeps positions and weights
        elements = routed * (layout.expert_tensor_parallel * (hf["hidden_size"] + 28) + self._of_expert(hf, layout))
        elements += 6 * hf["num_experts"]  # what the router keeps in float32
        if "shared_experts" not in again:
            elements += _SWIGLU * self.shared_width(hf) + (self.shared_gate is not None) * (hf["hidden_size"] + 1)
        return float(elements)

    def repeated_width(self, hf: Hf, again: frozenset[str]) -> int:
        routed = hf["num_experts_per_tok"] * hf["moe_intermediate_size"] if "moe" in again else 0
        return int(routed + (self.shared_width(hf) if again & {"moe", "shared_experts"} else 0))

    def _of_expert(self, hf: Hf, layout: Layout) -> float:
        """Elements that the activation of an expert keeps of a token."""
        return float(_SWIGLU * hf["moe_intermediate_size"])


@dataclass(frozen=True)
class ClampedExperts(MixtureOfExperts):
    """Experts of gpt-oss: the activation is (clamp(up) + 1) clamp(gate) sigmoid(1.702 clamp(gate)), and router and
    projections have biases.

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

    def _of_expert(self, hf: Hf, layout: Layout) -> float:
        # gate and up, clamped, and up with its offset; and the one-hot matrix of each row's expert, once plain and once
        # multiplied by the probabilities
        more = 3 * hf["moe_intermediate_size"] + 2 * hf["num_experts"] / layout.expert_parallel
        return super()._of_expert(hf, layout) + more
