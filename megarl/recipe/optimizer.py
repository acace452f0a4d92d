"""The option of Megatron's optimizer that megarl supports: an optimizer in host memory.

With ``use_precision_aware_optimizer`` and ``optimizer_cpu_offload`` Megatron-Core has its HybridDeviceOptimizer: for a
share of the parameters, master weights, moments and a copy of the gradients are kept in host memory, all in float32,
and updated there.
"""

from __future__ import annotations

from megarl.errors import UserError
from megarl.recipe.tables import Recipe

STATE_BYTES = 12  # of a parameter's master weight and two moments


def offloaded(recipe: Recipe) -> float:
    """The share of parameters whose optimizer state is in host memory, 0 to 1."""
    table = recipe.megatron_optimizer
    return float(table.get("optimizer_offload_fraction", 0.0)) if table.get("optimizer_cpu_offload") else 0.0


def check_optimizer(recipe: Recipe) -> None:
    """Raise `UserError` for settings that Megatron would refuse late or that megarl's checkpoints cannot hold."""
    table = recipe.megatron_optimizer
    aware, offload = table.get("use_precision_aware_optimizer", False), table.get("optimizer_cpu_offload", False)

    def refuse(name: str, why: str) -> None:
        raise UserError(f"[megatron_optimizer] {name} = {str(table[name]).lower()}: {why}")

    for name in ("lr", "min_lr", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "clip_grad"):
        if name in table:
            refuse(name, "set it in [optimizer] instead")
    for name in ("decoupled_lr", "decoupled_min_lr"):
        if name in table:
            refuse(name, "all parameters have one learning rate; leave it out")
    for name in ("main_params_dtype", "main_grads_dtype", "params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if name in table:
            refuse(name, "megarl keeps master weights and moments in float32, parameters in bfloat16; leave it out")
    if table.get("store_param_remainders"):
        refuse("store_param_remainders", "checkpoints hold whole master weights; leave it out")
    if offload and recipe.actor.backend == "cpu":
        refuse("optimizer_cpu_offload", 'needs [actor] backend = "cuda"')
    if aware and not offload:
        refuse("use_precision_aware_optimizer", "it is supported only with optimizer_cpu_offload = true; leave it out")
    if offload and not aware:
        why = "without use_precision_aware_optimizer = true master weights would stay on the GPU as well"
        refuse("optimizer_cpu_offload", why)
    if offload and not 0 < offloaded(recipe) <= 1:
        refuse("optimizer_cpu_offload", "set optimizer_offload_fraction, the share to offload, above 0 and up to 1")
