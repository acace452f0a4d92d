"""Checks the settings of ``[actor]`` and ``[megatron]`` that a model's layers may not support."""

from __future__ import annotations

from typing import Any

from megarl.errors import UserError
from megarl.models import family_of
from megarl.models.lora import matrices
from megarl.recipe.actor_table import OWNED, Recompute
from megarl.recipe.tables import Recipe

# settings of Megatron that megarl's layers, schedules or checkpoints do not support
_UNSUPPORTED = {
    "megatron": (
        "attention_dropout", "hidden_dropout", "moe_input_jitter_eps", "mtp_num_layers", "no_rope_freq",
        "rotary_interleaved", "moe_apply_probs_on_input", "moe_latent_size", "moe_expert_capacity_factor",
        "moe_shared_expert_overlap", "cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph", "fp4", "fp8",
        "fp8_param", "params_dtype", "pipeline_dtype", "autocast_dtype",
    ),
    "megatron_ddp": ("use_megatron_fsdp", "use_custom_fsdp", "align_param_gather", "fp8_param_gather", "nccl_ub"),
}  # fmt: skip
# settings that only some families' models have, but that would change any model
_OF_SOME = (
    "softmax_type", "window_size", "window_attn_skip_freq", "activation_func_clamp_value", "glu_linear_offset",
)  # fmt: skip


def check_layers(recipe: Recipe, hf: dict[str, Any]) -> None:
    """`UserError` if ``[actor] layers``, recompute or another setting is not supported for this model."""
    # with another value the model would not be that of its config.json, which no engine could load
    decided = {*family_of(hf).megatron_settings(hf), *_OF_SOME} - {"moe_router_bias_update_rate"}
    if taken := sorted(decided & recipe.megatron.keys()):  # whatever the value: 0 and [] may change the model too
        raise UserError(f"[megatron] {taken[0]}: config.json decides it: remove the key")
    for table, names in _UNSUPPORTED.items():
        for name in names:
            if value := getattr(recipe, table).get(name):
                raise UserError(f"[{table}] {name} = {value!r}: megarl does not support it; remove the key")
    _check_recompute(recipe, hf)


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
        if name == "moe_act" and not of_engine:
            reason = "only Transformer Engine's experts can recompute it; \"moe\" recomputes all of a layer's experts"
        elif name in modules and f"{modules[name]}.linear_fc1" not in there:
            reason = f"no layer of this {hf['model_type']} has it"
        if reason:
            raise UserError(f"[actor] recompute: {name!r}: {reason}")
    if {"moe", "shared_experts"} <= again.modules or {"moe", "moe_act"} <= again.modules:
        raise UserError('[actor] recompute: "moe" includes "shared_experts" and "moe_act"; leave these out')
