"""Checks the settings of ``[actor]`` and ``[megatron]`` that a model's layers may not support."""

from __future__ import annotations

import importlib.util
from typing import Any

from megarl.errors import UserError
from megarl.models import family_of
from megarl.recipe.actor_table import OWNED, Recompute
from megarl.recipe.megatron import SCALINGS, scaling_of
from megarl.recipe.tables import Recipe


def check_layers(recipe: Recipe, hf: dict[str, Any], here: bool = True) -> None:
    """`UserError` if ``[actor] layers``, recompute, fp8 or another setting is not supported for this model.

    here: whether the run is to be on this machine; False, as for a plan, does not look at what is installed here.
    """
    attention = family_of(hf).attention
    if attention.norms_all_heads and recipe.megatron.get("qk_layernorm"):
        raise UserError(
            "[megatron] qk_layernorm: it normalises each head by itself, but this model normalises queries and keys "
            "over all heads; leave it out"
        )
    if _fused(recipe, here) and attention.torch_layers_only:
        raise UserError(
            f"[actor] layers = {recipe.actor.layers!r}: the attention of {hf['model_type']} was never compared with "
            'Transformer Engine\'s layers; use "torch"'
        )
    _check_recompute(recipe, hf, here)
    _check_fp8(recipe, here)


def _fused(recipe: Recipe, here: bool) -> bool:
    """Whether the layers are Transformer Engine's. For ``layers = "auto"`` on another machine that is known only if
    fp8 is set, which needs them; otherwise the answer is False."""
    actor = recipe.actor
    if here or actor.layers != "auto":
        return actor.layer_kind == "transformer_engine"
    return scaling_of(recipe.megatron) is not None


def _check_recompute(recipe: Recipe, hf: dict[str, Any], here: bool) -> None:
    for name in OWNED:
        if name in recipe.megatron:
            raise UserError(f'[megatron] {name}: use [actor] recompute = "full", or a list such as ["moe"]')
    again = Recompute.of(recipe.actor.recompute, recipe.megatron)
    for name in ("recompute_method", "recompute_num_layers"):
        if name in recipe.megatron and not again.whole:
            raise UserError(f'[megatron] {name}: it has an effect only with [actor] recompute = "full"; leave it out')
    if again.layers < 1:
        raise UserError(f"[megatron] recompute_num_layers = {again.layers}: must be at least 1")
    of_engine = _fused(recipe, here) and hf["num_experts"]
    for name in sorted(again.modules):
        reason = None
        if name == "mla_up_proj":
            reason = "latent attention is megarl's own, of torch modules, which cannot recompute it"
        elif name == "moe_act" and not of_engine:
            reason = "only Transformer Engine's experts can recompute it; \"moe\" recomputes all of a layer's experts"
        elif name in ("mlp", "moe", "shared_experts") and not family_of(hf).repeated_flops(hf, 1, frozenset({name})):
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


def _check_fp8(recipe: Recipe, here: bool) -> None:
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
        raise UserError(
            f'{asked} needs Transformer Engine\'s layers on GPUs: not with [actor] layers = "torch" or backend = "cpu"'
        )
    if here and importlib.util.find_spec("transformer_engine") is None:
        raise UserError(f"{asked} needs Transformer Engine: pip install transformer-engine[pytorch]")
