"""The actor of one rank, and its one operation: an optimizer update over packed micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megarl.actor import routing
from megarl.actor.frozen import FrozenPolicy
from megarl.actor.hf import load_hf
from megarl.actor.model import PolicyModel, build_model
from megarl.actor.nonfinite import non_finite_update
from megarl.actor.packing import MicroBatch
from megarl.actor.schedule import LogprobsAndEntropy, Loss, MicroBatchLog, collect, run_micro_batches, token_batch
from megarl.batch import TokenBatch
from megarl.models.hf_config import read_hf_config
from megarl.objectives import Objective, WithOptions, token_weights
from megarl.objectives.parts.summary import summarise
from megarl.recipe.tables import Recipe


@dataclass
class Actor:
    recipe: Recipe
    device: torch.device
    models: list[PolicyModel]  # this rank's chunks; more than one with virtual pipeline stages
    replicas: list[DistributedDataParallel]  # the same chunks, wrapped
    optimizer: MegatronOptimizer
    frozen: list[FrozenPolicy] = field(default_factory=list)  # with which some objectives compare the policy
    skipped_updates: int = 0  # in the whole run, because they were not finite
    lagged: Any = None  # batch statistics of the previous update, under ``statistics_scope = "lagged"``
    saving: AsyncCallsQueue = field(default_factory=AsyncCallsQueue)  # the checkpoint being written, if any

    @classmethod
    def build(cls, recipe: Recipe, policy_dir: Path, device: torch.device) -> Actor:
        """Model with the weights of ``policy_dir``, Megatron's DDP and distributed optimizer. Collective."""
        models = build_model(read_hf_config(policy_dir), recipe)
        load_hf(models, policy_dir)
        routing.install(models, replays=recipe.actor.routing_replay != "none")
        config, table = models[0].config, recipe.optimizer
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        replicas = [DistributedDataParallel(config, ddp, m, disable_bucketing=i > 0) for i, m in enumerate(models)]
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=table.lr,
                adam_beta1=table.betas[0],
                adam_beta2=table.betas[1],
                adam_eps=table.eps,
                weight_decay=table.weight_decay,
                clip_grad=table.clip_grad,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                use_distributed_optimizer=True,
            ),
            replicas,
        )
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss
        return cls(recipe, device, models, replicas, optimizer)

    def learning_rate(self, update: int) -> float:
        """Linear warm-up to ``optimizer.lr`` over the run's first updates (``update`` counts from 1), then constant."""
        table = self.recipe.optimizer
        return table.lr * min(1.0, update / max(1, table.warmup_updates))


def train_step(
    actor: Actor, micro_batches: list[MicroBatch], objective: Objective | WithOptions, lr: float
) -> dict[str, float]:
    """One optimizer update; returns metrics averaged over the whole optimizer batch of all ranks.

    micro_batches: those of this data-parallel rank. Raises `NonFiniteUpdate` on all ranks, before anything is applied,
    when the loss or the gradient is not finite. Outside the last pipeline stage it returns only ``grad_norm`` and
    ``lr``.
    """
    logs, metrics = compute_gradients(actor, micro_batches, objective)
    norm = _gradient_norm(actor.optimizer)
    if not _all_finite(metrics.get("loss", 0.0), norm):
        raise non_finite_update(logs, objective, metrics, norm, _batch_group())
    _apply_gradients(actor.optimizer, norm, lr)
    metrics |= {"grad_norm": norm, "lr": lr}
    if objective.needs_statistics and actor.recipe.actor.statistics_scope == "lagged":
        actor.lagged = _whole_batch_statistics(objective, logs, actor.recipe.actor.kernel_backend)
    return metrics


def compute_gradients(
    actor: Actor, micro_batches: list[MicroBatch], objective: Objective | WithOptions
) -> tuple[list[MicroBatchLog], dict[str, float]]:
    """Forward and backward passes of an update. Leaves the reduced gradients in the replicas' buffers.

    Returns this rank's logs, one a micro-batch, and the metrics of the whole batch.
    """
    for policy in actor.frozen:
        micro_batches = policy.annotate(micro_batches)
    statistics = _statistics(actor, micro_batches, objective)
    for replica in actor.replicas:
        replica.zero_grad_buffer()
    actor.optimizer.zero_grad()
    backend = actor.recipe.actor.kernel_backend
    loss = partial(_loss, objective=objective, statistics=statistics, backend=backend)
    logs = run_micro_batches(actor.replicas, micro_batches, loss)
    return logs, _reduce(logs) | routing.disagreement(actor.models, actor.device)


def _statistics(
    actor: Actor, micro_batches: list[MicroBatch], objective: Objective | WithOptions
) -> Callable[[TokenBatch], Any]:
    """A function from a micro-batch to the statistics that its objective gets, by ``actor.statistics_scope``."""
    scope, backend = actor.recipe.actor.statistics_scope, actor.recipe.actor.kernel_backend
    if not objective.needs_statistics or scope == "micro":
        return lambda batch: None  # the objective then takes the statistics of the micro-batch
    if scope == "lagged" and actor.lagged is not None:
        return lambda batch: actor.lagged
    if len(micro_batches) == 1 and mpu.get_pipeline_model_parallel_world_size() == 1:
        # this rank's whole batch is one micro-batch: its log-probs are known without an extra pass
        return lambda batch: objective.statistics(batch.detach(), _batch_group(), backend)
    logs = run_micro_batches(actor.replicas, micro_batches, collect, forward_only=True)
    exact = _whole_batch_statistics(objective, logs, backend)
    return lambda batch: exact


def _whole_batch_statistics(objective: Objective | WithOptions, logs: list[MicroBatchLog], backend: str) -> Any:
    """Exact statistics on the last pipeline stage; elsewhere () and not None, so that all ranks know there are some."""
    if not logs:
        return ()
    return objective.statistics(TokenBatch.concatenate([log.batch for log in logs]), _batch_group(), backend)


def _batch_group() -> dist.ProcessGroup:
    """The ranks that together hold the optimizer batch."""
    return mpu.get_data_parallel_group(with_context_parallel=True)


def _loss(
    micro_batch: MicroBatch,
    output: LogprobsAndEntropy,
    objective: Objective | WithOptions,
    statistics: Callable[[TokenBatch], Any],
    backend: str,
) -> Loss:
    """The objective as Megatron wants it: (sum, count, log). Megatron divides the gradient by the global count."""
    batch = token_batch(micro_batch, output)
    terms = objective(batch, statistics(batch), backend)
    weights = token_weights(batch.loss_mask, batch.cu_seqlens, objective.aggregation, batch.shard)
    loss = (terms.loss * weights).sum()
    count = micro_batch.sequence_count if objective.aggregation == "sequence_mean" else micro_batch.token_count
    batch = batch.detach()
    log = MicroBatchLog(batch, terms.metrics, terms.histograms)
    return loss, torch.tensor(count, dtype=torch.int, device=loss.device), log


def _reduce(logs: list[MicroBatchLog]) -> dict[str, float]:
    """Means over all micro-batches and data-parallel ranks. The one wait for the device in an update."""
    if not logs:
        return {}  # not the last pipeline stage
    pairs = torch.stack([torch.stack([x for p in log.metrics.values() for x in p]) for log in logs]).sum(0)
    counts = torch.stack([torch.stack(list(log.histograms.values())) for log in logs]).sum(0)
    dist.all_reduce(pairs, group=_batch_group())
    dist.all_reduce(counts, group=_batch_group())
    metrics = {name: tuple(p) for name, p in zip(logs[0].metrics, pairs.cpu().view(-1, 2), strict=True)}
    return summarise(metrics, dict(zip(logs[0].histograms, counts.cpu(), strict=True)))


def _gradient_norm(optimizer: MegatronOptimizer) -> float:
    """L2 norm of the whole gradient over all ranks; not finite if any element is not."""
    overflow = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    return math.nan if overflow else norm


def _all_finite(loss: float, norm: float) -> bool:
    """The same answer on all ranks, though only the last pipeline stage knows the loss."""
    finite = math.isfinite(loss) and math.isfinite(norm)
    pipeline = mpu.get_pipeline_model_parallel_group()
    if pipeline.size() == 1:
        return finite
    flag = torch.tensor([float(finite)], device=_device_of(pipeline))
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=pipeline)
    return bool(flag)


def _device_of(group: dist.ProcessGroup) -> torch.device:
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _apply_gradients(optimizer: MegatronOptimizer, norm: float, lr: float) -> None:
    """The rest of MegatronOptimizer.step, after `_gradient_norm`."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        # what Megatron's own scheduler would do: no decay on norms and biases
        group["weight_decay"] = optimizer.config.weight_decay * group.get("wd_mult", 1.0)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.config.clip_grad > 0 and part.get_parameters():
            clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm=part.config.clip_grad, total_norm=norm)
    optimizer.step_with_ready_grads()
