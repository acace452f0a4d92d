"""The actor of one rank and its one verb: an optimizer update over packed micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func

from megarl.actor.hf import load_hf
from megarl.actor.model import PolicyModel, build_model, read_hf_config
from megarl.actor.packing import MicroBatch
from megarl.batch import TokenBatch
from megarl.config import Recipe
from megarl.objectives import Objective, token_weights
from megarl.objectives.terms import mean_metric

Loss = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class NonFiniteUpdate(RuntimeError):
    """Loss or gradient is not finite; the update was not applied."""


@dataclass
class Actor:
    recipe: Recipe
    device: torch.device
    models: list[PolicyModel]  # this rank's chunks; more than one with virtual pipeline stages
    replicas: list[DistributedDataParallel]  # the same chunks, wrapped
    optimizer: MegatronOptimizer

    @classmethod
    def build(cls, recipe: Recipe, policy_dir: Path, device: torch.device) -> Actor:
        """Model with the weights of ``policy_dir``, Megatron's DDP and distributed optimizer. Collective."""
        models = build_model(read_hf_config(policy_dir), recipe)
        load_hf(models, policy_dir)
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


def train_step(actor: Actor, micro_batches: list[MicroBatch], objective: Objective, lr: float) -> dict[str, float]:
    """One optimizer update; returns metrics averaged over the whole optimizer batch of all ranks.

    ``micro_batches`` are this data-parallel rank's own. Raises `NonFiniteUpdate`, before anything is applied, when the
    loss or the gradient is not finite. On ranks outside the last pipeline stage only ``grad_norm`` and ``lr`` come back.
    """
    names: list[str] = []
    sums = _forward_backward(actor, micro_batches, partial(_loss, objective=objective, names=names))
    metrics = _reduce(sums, names)
    if not math.isfinite(metrics.get("loss", 0.0)):
        raise NonFiniteUpdate(f"loss is {metrics['loss']}; the update was not applied")
    metrics["grad_norm"] = _apply_gradients(actor.optimizer, lr)
    metrics["lr"] = lr
    return metrics


def _forward_backward(
    actor: Actor, micro_batches: list[MicroBatch], loss: Callable[[MicroBatch, torch.Tensor], Loss]
) -> list[torch.Tensor]:
    """Gradients of all micro-batches through Megatron's schedule; the third loss output of each comes back."""

    def forward_step(micro_batch: Iterator[MicroBatch], model: DistributedDataParallel) -> tuple[torch.Tensor, Any]:
        batch = next(micro_batch)
        output = model(batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=batch.packed)
        return output, partial(loss, batch)

    for replica in actor.replicas:
        replica.zero_grad_buffer()
    actor.optimizer.zero_grad()
    iterators = [iter(micro_batches) for _ in actor.replicas]
    several = len(actor.replicas) > 1
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if several else iterators[0],
        model=actor.replicas if several else actor.replicas[0],
        num_microbatches=len(micro_batches),
        seq_length=micro_batches[0].tokens.size(1),
        micro_batch_size=1,
        forward_only=False,
    )


def _loss(micro_batch: MicroBatch, output: torch.Tensor, objective: Objective, names: list[str]) -> Loss:
    """Megatron's contract: (sum, count, logged); it divides the gradient once by the global sum of counts."""
    logprobs, entropy = output  # [N], [N]
    batch = TokenBatch(
        logprobs=logprobs,
        rollout_logprobs=micro_batch.rollout_logprobs,
        advantages=micro_batch.advantages,
        loss_mask=micro_batch.loss_mask,
        cu_seqlens=micro_batch.cu_seqlens,
    )
    terms = objective(batch)
    weights = token_weights(batch.loss_mask, batch.cu_seqlens, objective.aggregation)
    loss = (terms.loss * weights).sum()
    count = micro_batch.sequence_count if objective.aggregation == "sequence_mean" else micro_batch.token_count
    pairs = terms.metrics | {"entropy": mean_metric(entropy, batch.loss_mask)}
    names[:] = pairs
    logged = torch.stack([x for pair in pairs.values() for x in pair]).view(-1, 2)
    return loss, torch.tensor(count, dtype=torch.int, device=loss.device), logged


def _reduce(logged: list[torch.Tensor], names: list[str]) -> dict[str, float]:
    """(sum, count) pairs of all micro-batches and data-parallel ranks to means; the one host sync of an update."""
    if not logged:
        return {}  # not the last pipeline stage
    pairs = torch.stack(logged).sum(0)  # [M, 2] float64
    dist.all_reduce(pairs, group=mpu.get_data_parallel_group(with_context_parallel=True))
    return {name: s / n if n else 0.0 for name, (s, n) in zip(names, pairs.tolist(), strict=True)}


def _apply_gradients(optimizer: MegatronOptimizer, lr: float) -> float:
    """MegatronOptimizer.step, with the finiteness of the gradient checked before anything changes."""
    overflow = optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if overflow or not math.isfinite(norm):
        raise NonFiniteUpdate(f"gradient norm is {norm}; the update was not applied")
    for group in optimizer.param_groups:
        group["lr"] = lr
        # what Megatron's own scheduler would do: no decay on norms and biases
        group["weight_decay"] = optimizer.config.weight_decay * group.get("wd_mult", 1.0)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.config.clip_grad > 0 and part.get_parameters():
            clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm=part.config.clip_grad, total_norm=norm)
    optimizer.step_with_ready_grads()
    return norm
