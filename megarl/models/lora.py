"""Which matrices of a model can have low-rank adapters, and the checks of ``[actor.lora]`` against model and layout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from megarl.errors import UserError
from megarl.models import family_of
from megarl.models.tensors import TRANSPOSED
from megarl.recipe.layout import Layout
from megarl.recipe.tables import Recipe

_MATRICES = (
    *(f"self_attention.linear_{name}" for name in ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj")),
    *(f"self_attention.linear_{name}" for name in ("qkv", "proj")),
    *(f"mlp.{part}linear_fc{n}" for part in ("", "experts.", "shared_experts.") for n in (1, 2)),
)


@dataclass(frozen=True)
class Matrix:
    """A weight matrix of a Megatron layer, or one of the matrices that every expert of the layer has."""

    name: str  # the module's name in the layer, such as "self_attention.linear_qkv" or "mlp.experts.linear_fc1"

    @property
    def parts(self) -> int:
        """Number of matrices concatenated in this one that tensor parallelism divides separately: 2 for gate and up."""
        return 2 if self.name.endswith("linear_fc1") else 1

    @property
    def splits_inputs(self) -> bool:
        """Whether tensor parallelism divides the matrix's inputs instead of its outputs."""
        return self.name.endswith(("linear_proj", "linear_fc2"))

    @property
    def whole(self) -> bool:
        """Whether every tensor-parallel rank has the whole matrix, and applies it to its share of the tokens."""
        return self.name.endswith("_down_proj")

    @property
    def of_experts(self) -> bool:
        return self.name.startswith("mlp.experts.")


def matrices(hf: dict[str, Any], layer: int) -> list[Matrix]:
    """The matrices of layer ``layer`` (from 0) that can have adapters: all but those of linear attention."""
    names = family_of(hf).layer_tensors(hf, layer)
    return [Matrix(name) for name in _MATRICES if f"{name}.weight" in names]


def targeted(hf: dict[str, Any], layer: int, targets: tuple[str, ...]) -> list[Matrix]:
    """The matrices of layer ``layer`` (from 0) that ``[actor.lora] targets`` names."""
    return [m for m in matrices(hf, layer) if any(f".{m.name}".endswith(f".{target}") for target in targets)]


def check_lora(recipe: Recipe, hf: dict[str, Any]) -> None:
    """`UserError` if this model, layout or machine cannot have the adapters of ``[actor.lora]``. The layout itself has
    been checked before."""
    table = recipe.actor.lora
    if table is None:
        return
    layers = range(hf["num_hidden_layers"])
    known = list(dict.fromkeys(matrix.name for layer in layers for matrix in matrices(hf, layer)))
    for target in table.targets:
        if not any(f".{name}".endswith(f".{target}") for name in known):
            raise UserError(
                f"[actor.lora] targets: {target!r} matches no matrix of this {hf['model_type']}; for adapters on all "
                f"that it has: targets = {json.dumps(known)}"
            )
    layout = Layout.of(recipe, 1)
    for chunk in layout.chunks(len(layers)):
        if not any(targeted(hf, layer, table.targets) for layer in chunk):
            raise UserError(
                f"[actor.lora] targets: layers {chunk[0]} to {chunk[-1]} have none of these matrices, but are a "
                "pipeline stage of their own, which would have nothing to train: add targets, or use fewer stages"
            )
    of_experts = any(matrix.of_experts for layer in layers for matrix in targeted(hf, layer, table.targets))
    if of_experts and layout.expert_tensor_parallel not in (1, layout.tensor_parallel):
        raise UserError(
            f"[actor.lora] targets experts: expert_tensor_parallel = {layout.expert_tensor_parallel} must be 1 or "
            f"tensor_parallel = {layout.tensor_parallel}: otherwise the norm of the gradient counts adapters twice"
        )
    if recipe.megatron.get("moe_router_bias_update_rate"):
        raise UserError(
            "[megatron] moe_router_bias_update_rate: checkpoints of [actor.lora] have only the adapters, so updates of "
            "the router's bias would be lost; leave it out"
        )
    if recipe.megatron_optimizer.get("optimizer_cpu_offload"):
        why = "[actor.lora] was never tested with it; leave it out"
        raise UserError(f"[megatron_optimizer] optimizer_cpu_offload = true: {why}")


def check_exported_alone(recipe: Recipe, hf: dict[str, Any]) -> None:
    """`UserError` if PEFT's format cannot express the adapters: those of experts in transposed tensors."""
    assert recipe.actor.lora is not None
    for layer in range(hf["num_hidden_layers"]):
        names = family_of(hf).layer_tensors(hf, layer)
        for matrix in targeted(hf, layer, recipe.actor.lora.targets):
            if names[f"{matrix.name}.weight"].packing in TRANSPOSED:
                raise UserError(
                    f"--adapters: {hf['model_type']} has all experts of a layer in one transposed tensor, and PEFT and "
                    f"vLLM agree on no names for adapters of {matrix.name}: export the merged model, without --adapters"
                )
