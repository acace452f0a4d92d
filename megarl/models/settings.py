"""Checks the settings of ``[actor]`` and ``[megatron]`` that a model's layers may not support."""

from __future__ import annotations

from typing import Any

from megarl.errors import UserError
from megarl.models import family_of
from megarl.models.lora import matrices
from megarl.recipe.actor_table import OWNED, Recompute
from megarl.recipe.megatron import SCALINGS, scaling_of
from megarl.recipe.tables import Recipe


def check_layers(recipe: Recipe, hf: dict[str, Any]) -> None:
    """`UserError` if ``[actor] layers``, recompute, fp8 or another setting is not supported for this model."""
    attention = family_of(hf).attention
    if attention.norms_all_heads and recipe.megatron.get("qk_layernorm"):
        raise UserError(
            "[megatron] qk_layernorm: it normalises each head by itself, but this model normalises queries and keys "
            "over all heads; leave it out"
        )
    _check_recompute(recipe, hf)
    _check_fp8(recipe)
    _check_dispatcher(recipe)


def _check_recompute(recipe: Recipe, hf: dict[str, Any]) -> None:
    for name in OWNED:
        if name in recipe.megatron:
            raise UserError(f'[megatron] {name}: use [actor] recompute = "full", or a list such as ["moe"]')
    again = Recompute.of(recipe.actor.recompute, recipe.megatron)
    for name in ("recompute_method", "recompute_num_layers"):
        if name in recipe.megatron and not again.whole:
            raise UserError(f'[megatron] {name}: it has an effect only with [actor] recompute = "full"; leave it out')
    if again.layers < 1:
        raise UserError(f"[megatron] recompute_num_layers = {again.layers}: must be at least 1")
    there = {matrix.name for layer in range(hf["num_hidden_layers"]) for matrix in matrices(hf, layer)}
    modules = {"mlp": "mlp", "moe": "mlp.experts", "shared_experts": "mlp.shared_experts"}
    of_engine = recipe.actor.layers == "transformer_engine" and hf["num_experts"]
    for name in sorted(again.modules):
        reason = None
        if name == "mla_up_proj":
            reason = "latent attention is megarl's own, which cannot recompute it"
        elif name == "moe_act" and not of_engine:
            reason = "only Transformer Engine's experts can recompute it; \"moe\" recomputes all of a layer's experts"
        elif name in modules and f"{modules[name]}.linear_fc1" not in there:
            reason = f"no layer of this {hf['model_type']} has it"
        if reason:
            raise UserError(f"[actor] recompute: {name!r}: {reason}")
    if {"moe", "shared_experts"} <= again.modules or {"moe", "moe_act"} <= again.modules:
        raise UserError('[actor] recompute: "moe" includes "shared_experts" and "moe_act"; leave these out')
    if "shared_experts" in again.modules and recipe.megatron.get("moe_shared_expert_overlap"):
        raise UserError(
            '[megatron] moe_shared_expert_overlap = true excludes "shared_experts" in [actor] recompute; leave one out'
        )
    if {"layernorm", "moe_act"} & again.modules and scaling_of(recipe.megatron) == "delayed":
        raise UserError(
            '[actor] recompute: with fp8, "layernorm" and "moe_act" need another [megatron] fp8_recipe than "delayed", '
            "which is the default"
        )


def _check_fp8(recipe: Recipe) -> None:
    if recipe.megatron.get("fp4"):
        raise UserError("[megatron] fp4: megarl does not support it; use fp8")
    for table, setting in (("megatron", "fp8_param"), ("megatron_ddp", "fp8_param_gather")):
        if getattr(recipe, table).get(setting):
            raise UserError(f"[{table}] {setting} = true: megarl reads and exports bfloat16 parameters; leave it out")
    name = scaling_of(recipe.megatron)
    if name is None:
        return
    asked = f"[megatron] fp8 = {recipe.megatron['fp8']!r}"
    if name not in SCALINGS:
        raise UserError(f"[megatron] fp8_recipe = {name!r} is unknown; known are {', '.join(SCALINGS)}")
    if recipe.actor.backend == "cpu" or recipe.actor.layers == "torch":
        raise UserError(f'{asked} needs [actor] backend = "cuda" and layers = "transformer_engine"')


def _check_dispatcher(recipe: Recipe) -> None:
    kind = recipe.megatron.get("moe_token_dispatcher_type")
    if kind == "allgather":
        raise UserError(
            '[megatron] moe_token_dispatcher_type = "allgather": it needs micro-batches of one length; use "alltoall", '
            'or "flex" for DeepEP'
        )
    if kind == "flex" and recipe.megatron.get("moe_flex_dispatcher_backend") == "hybridep":
        raise UserError(
            '[megatron] moe_flex_dispatcher_backend = "hybridep": HybridEP gathers the choices of all ranks as if each '
            "had the same number of tokens (csrc/hybrid_ep/executor/executor.cu), but packed micro-batches differ; use "
            '"deepep"'
        )
