"""The options of Megatron's optimizer that megarl supports: moments in bfloat16, and an optimizer in host memory.

In Megatron-Core 0.16.1 ``use_precision_aware_optimizer`` selects Transformer Engine's FusedAdam, which keeps master
weights and moments in configurable types. With ``optimizer_cpu_offload`` as well it selects Megatron's
HybridDeviceOptimizer: for a share of the parameters, master weights, moments and a copy of the gradients are kept in
host memory, all in float32, and updated there.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from megarl.errors import UserError
from megarl.recipe.tables import Recipe

_BYTES = {"float32": 4, "bfloat16": 2}
_MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes of optimizer state per parameter, on the data-parallel rank that owns the parameter."""

    gpu: float
    host: float
    checkpoint: int  # master weight and moments, in addition to the model's weight

    @classmethod
    def of(cls, recipe: Recipe) -> OptimizerBytes:
        """The bytes with the recipe's ``[megatron_optimizer]``."""
        table = recipe.megatron_optimizer
        state = 4 + sum(_BYTES[table.get(name, "float32")] for name in _MOMENTS)
        share = offloaded(recipe)
        return cls(gpu=(1 - share) * state, host=share * (state + 4), checkpoint=state)


def offloaded(recipe: Recipe) -> float:
    """The share of parameters whose optimizer state is in host memory, 0 to 1."""
    table = recipe.megatron_optimizer
    return float(table.get("optimizer_offload_fraction", 0.0)) if table.get("optimizer_cpu_offload") else 0.0


def check_optimizer(recipe: Recipe, here: bool = True) -> None:
    """Raise `UserError` for settings that Megatron would refuse late or that megarl's checkpoints cannot hold.

    here: whether the run happens on this machine, which then needs Transformer Engine; False for `megarl plan`.
    """
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
    for name in ("main_params_dtype", "main_grads_dtype", "params_dtype"):
        if name in table:
            refuse(name, "megarl keeps master weights in float32 and parameters in bfloat16; leave it out")
    if table.get("store_param_remainders"):
        refuse("store_param_remainders", "checkpoints hold whole master weights; leave it out")
    for name in _MOMENTS:
        if name in table and table[name] not in _BYTES:
            refuse(name, "checkpoints do not hold the scaling factors of such a type; use bfloat16 or float32")
        if name in table and (offload or not aware):
            what = "the optimizer on the host keeps float32" if offload else "it needs use_precision_aware_optimizer"
            refuse(name, f"{what}; leave it out" if offload else what)
    if (aware or offload) and recipe.actor.backend == "cpu":
        name = "optimizer_cpu_offload" if offload else "use_precision_aware_optimizer"
        refuse(name, 'needs [actor] backend = "cuda"')
    if offload and not aware:
        why = "without use_precision_aware_optimizer = true master weights would stay on the GPU as well"
        refuse("optimizer_cpu_offload", why)
    if offload and not 0 < offloaded(recipe) <= 1:
        refuse("optimizer_cpu_offload", "set optimizer_offload_fraction, the share to offload, above 0 and up to 1")
    if aware and not offload and here and importlib.util.find_spec("transformer_engine") is None:
        why = "it needs Transformer Engine, which is not installed; optimizer_cpu_offload = true works without it"
        refuse("use_precision_aware_optimizer", why)
