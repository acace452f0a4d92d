"""Which matrices of a model can have low-rank adapters, and what of ``[actor.lora]`` a model or a layout rules out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.errors import UserError
from megarl.models import family_of
from megarl.models.attention import GroupedQueryAttention
from megarl.models.feed_forward import MixtureOfExperts
from megarl.models.tensors import TRANSPOSED
from megarl.recipe.layout import Layout
from megarl.recipe.tables import Recipe


@dataclass(frozen=True)
class Matrix:
    """A matrix of a layer, or that of each of its experts, as Megatron has it."""

    name: str  # of its module in the layer, as "self_attention.linear_qkv" or "mlp.experts.linear_fc1"
    outputs: int
    inputs: int

    @property
    def parts(self) -> int:
        """Matrices that stand one below another and of each of which a tensor-parallel rank has a part: gate and up."""
        return 2 if self.name.endswith("linear_fc1") else 1

    @property
    def splits_inputs(self) -> bool:
        """Whether tensor parallelism divides its inputs, and not its outputs."""
        return self.name.endswith(("linear_proj", "linear_fc2"))

    @property
    def of_experts(self) -> bool:
        return self.name.startswith("mlp.experts.")


def matrices(hf: dict[str, Any], layer: int) -> list[Matrix]:
    """Those of layer ``layer``, from 0. Of latent and of gated attention there are none."""
    family, hidden = family_of(hf), hf["hidden_size"]
    widths: dict[str, Any] = {"mlp": hf.get("intermediate_size"), "mlp.experts": hf.get("moe_intermediate_size")}
    if isinstance(family.feed_forward, MixtureOfExperts):
        widths["mlp.shared_experts"] = family.feed_forward.shared_width(hf)
    found = []
    if isinstance(family.attention, GroupedQueryAttention) and not family.attention.output_gate:
        query, key = (hf[name] * hf["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
        found += [
            Matrix("self_attention.linear_qkv", query + 2 * key, hidden),
            Matrix("self_attention.linear_proj", hidden, query),
        ]
    names = family.layer_tensors(hf, layer)
    for module, width in widths.items():
        if f"{module}.linear_fc1.weight" in names:
            found += [
                Matrix(f"{module}.linear_fc1", 2 * width, hidden),
                Matrix(f"{module}.linear_fc2", hidden, width),
            ]
    return found


def targeted(hf: dict[str, Any], layer: int, targets: tuple[str, ...]) -> list[Matrix]:
    """Those of layer ``layer`` that ``[actor.lora] targets`` names."""
    return [m for m in matrices(hf, layer) if any(f".{m.name}".endswith(f".{target}") for target in targets)]


def check_lora(recipe: Recipe, hf: dict[str, Any]) -> None:
    """`UserError` for adapters that this model, layout or machine cannot have. The layout itself is valid."""
    table, actor = recipe.actor.lora, recipe.actor
    if table is None:
        return
    layers = range(hf["num_hidden_layers"])
    known = {matrix.name: matrix for layer in layers for matrix in matrices(hf, layer)}
    for target in table.targets:
        if not any(f".{name}".endswith(f".{target}") for name in known):
            raise UserError(f"[actor.lora] targets: {target!r} is none of {hf['model_type']}'s: {', '.join(known)}")
    chosen = {matrix.name: matrix for layer in layers for matrix in targeted(hf, layer, table.targets)}
    for name, matrix in chosen.items():
        if table.rank > min(matrix.outputs, matrix.inputs):
            raise UserError(
                f"[actor.lora] rank = {table.rank} is more than the rank of {name}, a matrix of {matrix.outputs} x "
                f"{matrix.inputs}: at most {min(matrix.outputs, matrix.inputs)}"
            )
    layout = Layout.of(recipe, 1)
    for chunk in layout.chunks(len(layers)):
        if not any(targeted(hf, layer, table.targets) for layer in chunk):
            raise UserError(
                f"[actor.lora] targets: none is in layers {chunk[0]} to {chunk[-1]}, which are a pipeline stage "
                "of their own and would have nothing to train: name others too, or use fewer stages"
            )
    of_experts = any(matrix.of_experts for matrix in chosen.values())
    if of_experts and layout.expert_tensor_parallel not in (1, layout.tensor_parallel):
        raise UserError(
            f"[actor.lora] targets experts: expert_tensor_parallel = {layout.expert_tensor_parallel} must be 1 or "
            f"tensor_parallel = {layout.tensor_parallel}, or the norm of the gradient would count adapters twice"
        )
    if actor.layer_kind == "transformer_engine":
        raise UserError(
            "[actor.lora]: Transformer Engine's layers have the norm inside the matrix, and no adapter gets at what "
            'comes between: set [actor] layers = "torch"'
        )
    if recipe.megatron.get("moe_router_bias_update_rate"):
        raise UserError(
            "[megatron] moe_router_bias_update_rate: checkpoints of [actor.lora] have adapters alone, so a bias that "
            "moves would be lost; leave it out"
        )
    if recipe.megatron.get("moe_shared_expert_overlap"):
        raise UserError("[megatron] moe_shared_expert_overlap = true: [actor.lora] was never checked with it")
    for name in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
        if recipe.megatron_optimizer.get(name):
            raise UserError(f"[megatron_optimizer] {name} = true: [actor.lora] was never checked with it; leave it out")


def check_exported_alone(recipe: Recipe, hf: dict[str, Any]) -> None:
    """`UserError` for adapters that PEFT's format has no module for: of experts in transposed tensors."""
    assert recipe.actor.lora is not None
    for layer in range(hf["num_hidden_layers"]):
        names = family_of(hf).layer_tensors(hf, layer)
        for matrix in targeted(hf, layer, recipe.actor.lora.targets):
            if names[f"{matrix.name}.weight"].packing in TRANSPOSED:
                raise UserError(
                    f"--adapters: in {hf['model_type']} the experts of a layer are one transposed tensor, and adapters "
                    f"of {matrix.name} have no names that PEFT and vLLM agree on: take the merged export"
                )
