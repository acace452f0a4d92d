"""Wraps the model in Megatron's DistributedDataParallel and distributed optimizer, configured by the recipe."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

from megarl.actor.model import PolicyModel
from megarl.errors import UserError
from megarl.recipe.tables import Recipe


def wrap(models: list[PolicyModel], recipe: Recipe) -> tuple[list[DistributedDataParallel], MegatronOptimizer]:
    """The model chunks wrapped in Megatron's DDP, and the optimizer of their parameters. Collective."""
    config, ddp = models[0].config, ddp_config(recipe)
    replicas = [DistributedDataParallel(config, ddp, m, disable_bucketing=i > 0) for i, m in enumerate(models)]
    optimizer = get_megatron_optimizer(
        optimizer_config(recipe, config.params_dtype),
        replicas,
        use_gloo_process_groups=recipe.actor.backend == "cpu",
    )
    for group in optimizer.param_groups:
        # torch's Adam with foreach takes the square roots of all second moments at once: 4 more bytes a parameter
        group["foreach"], group["fused"] = False, True
    config.finalize_model_grads_func = _finalize
    config.grad_scale_func = optimizer.scale_loss
    if ddp.overlap_grad_reduce:  # gradients leave during the backward pass of the last micro-batch
        several = len(replicas) > 1
        config.no_sync_func = [r.no_sync for r in replicas] if several else replicas[0].no_sync
    return replicas, optimizer


def _finalize(replicas: list[DistributedDataParallel], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Megatron's finalize_model_grads, but the count by which gradients are divided stays on the device; Megatron's own
    reads it to see whether it is 0."""
    finalize_model_grads(replicas, None, **kwargs)
    if num_tokens is None:
        return
    dist.broadcast(num_tokens, mpu.get_pipeline_model_parallel_last_rank(), mpu.get_pipeline_model_parallel_group())
    dist.all_reduce(num_tokens, group=mpu.get_data_parallel_group(with_context_parallel=True))
    for replica in replicas:
        replica.scale_gradients(1.0 / num_tokens.clamp(min=1))


def ddp_config(recipe: Recipe) -> DistributedDataParallelConfig:
    """On GPUs communication overlaps with computation, unless ``[megatron_ddp]`` says otherwise."""
    overlaps = recipe.actor.backend == "cuda"
    settings: dict[str, Any] = dict(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps,
    )
    settings |= recipe.megatron_ddp
    if not settings["use_distributed_optimizer"]:
        raise UserError("[megatron_ddp] use_distributed_optimizer = false: megarl's checkpoints need it; leave it true")
    return DistributedDataParallelConfig(**settings)


def optimizer_config(recipe: Recipe, params_dtype: torch.dtype) -> OptimizerConfig:
    """Megatron's optimizer configuration: ``[optimizer]``, and the further settings of ``[megatron_optimizer]``."""
    table = recipe.optimizer
    settings: dict[str, Any] = dict(
        optimizer="adam",
        lr=table.lr,
        adam_beta1=table.betas[0],
        adam_beta2=table.betas[1],
        adam_eps=table.eps,
        weight_decay=table.weight_decay,
        clip_grad=table.clip_grad,
        bf16=params_dtype == torch.bfloat16,
        params_dtype=params_dtype,
        use_distributed_optimizer=True,
        store_param_remainders=False,  # checkpoints hold whole master weights
    )
    given = recipe.megatron_optimizer
    if not given.get("optimizer_cpu_offload"):
        return OptimizerConfig(**settings | given)
    # Megatron-Core 0.16.1 would check Transformer Engine's version here, even if it is neither installed nor needed
    config = OptimizerConfig(**settings | given | {"use_precision_aware_optimizer": False})
    config.use_precision_aware_optimizer = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    return config


def gather_parameters(replicas: list[DistributedDataParallel]) -> None:
    """Gather the updated parameters from the ranks that own them. Call it before the weights are read. Collective.

    With ``overlap_param_gather`` they would otherwise arrive only during the next forward pass.
    """
    for replica in replicas:
        if replica.ddp_config.overlap_param_gather:
            replica.start_param_sync(force_sync=True)
