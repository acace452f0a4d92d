"""What megarl can do of Megatron's optimizers beyond plain Adam: moments in bfloat16, and an optimizer on the host.

Of Megatron-Core 0.16.1: ``use_precision_aware_optimizer`` is Transformer Engine's FusedAdam, which keeps master weights
and moments in types of their own; with ``optimizer_cpu_offload`` it is Megatron's HybridDeviceOptimizer, which keeps
master weights, moments and a copy of the gradients of a share of the parameters in host memory, all in float32, and
updates them there.
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
    """Of a parameter, on the data-parallel rank that owns it."""

    gpu: float
    host: float
    checkpoint: int  # beside the weights

    @classmethod
    def of(cls, recipe: Recipe) -> OptimizerBytes:
        table = recipe.megatron_optimizer
        state = 4 + sum(_BYTES[table.get(name, "float32")] for name in _MOMENTS)
        share = offloaded(recipe)
        return cls(gpu=(1 - share) * state, host=share * (state + 4), checkpoint=state)


def offloaded(recipe: Recipe) -> float:
    """Share of the parameters whose optimizer is in host memory."""
    table = recipe.megatron_optimizer
    return float(table.get("optimizer_offload_fraction", 0.0)) if table.get("optimizer_cpu_offload") else 0.0


def check_optimizer(recipe: Recipe, here: bool = True) -> None:
    """`UserError` for what Megatron would refuse late, or megarl's checkpoints could not keep.

    here: False asks nothing of this machine, as for a plan.
    """
    table = recipe.megatron_optimizer
    aware, offload = table.get("use_precision_aware_optimizer", False), table.get("optimizer_cpu_offload", False)

    def refuse(name: str, why: str) -> None:
        raise UserError(f"[megatron_optimizer] {name} = {str(table[name]).lower()}: {why}")

    for name in ("main_params_dtype", "main_grads_dtype", "params_dtype"):
        if name in table:
            refuse(name, "megarl keeps master weights in float32 and parameters in bfloat16; leave it out")
    if table.get("store_param_remainders"):
        refuse("store_param_remainders", "checkpoints hold whole master weights; leave it out")
    for name in _MOMENTS:
        if name in table and table[name] not in _BYTES:
            refuse(name, "its scaling factors are in no checkpoint; use bfloat16 or float32")
        if name in table and (offload or not aware):
            what = "the optimizer on the host keeps float32" if offload else "it needs use_precision_aware_optimizer"
            refuse(name, f"{what}; leave it out" if offload else what)
    if (aware or offload) and recipe.actor.backend == "cpu":
        name = "optimizer_cpu_offload" if offload else "use_precision_aware_optimizer"
        refuse(name, 'on [actor] backend = "cuda" alone')
    if offload and not aware:
        why = "without use_precision_aware_optimizer = true master weights would stay on the GPU as well"
        refuse("optimizer_cpu_offload", why)
    if offload and not 0 < offloaded(recipe) <= 1:
        refuse("optimizer_cpu_offload", "optimizer_offload_fraction says of what share, above 0 and up to 1")
    if aware and not offload and here and importlib.util.find_spec("transformer_engine") is None:
        why = "it is Transformer Engine's Adam, which is not installed; optimizer_cpu_offload = true does without"
        refuse("use_precision_aware_optimizer", why)
