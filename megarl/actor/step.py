"""`Actor`, the policy being trained as one rank holds it, and `train_step`, one optimizer update."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from megarl.actor import lora, routing
from megarl.actor.frozen import FrozenPolicy
from megarl.actor.hf import load_hf
from megarl.actor.model import PolicyModel, build_model
from megarl.actor.nonfinite import non_finite_update
from megarl.actor.optimizer import wrap
from megarl.actor.packing import MicroBatch
from megarl.actor.schedule import LogprobsAndEntropy, Loss, MicroBatchLog, collect, run_micro_batches, token_batch
from megarl.actor.writers import Saving
from megarl.batch import TokenBatch
from megarl.models.hf_config import read_hf_config
from megarl.objectives import Objective, token_weights
from megarl.objectives.parts.detail import detailed
from megarl.objectives.parts.metrics import response_metrics
from megarl.objectives.parts.summary import summarise
from megarl.recipe.tables import Recipe
from megarl.storage.policies import read_info

_LISTED = 50  # tokens of ``muted_tokens``


@dataclass
class Actor:
    """One rank's part of the policy being trained: model, optimizer, and the state carried from update to update."""

    recipe: Recipe
    device: torch.device
    models: list[PolicyModel]  # this rank's model chunks; more than one with virtual pipeline stages
    replicas: list[DistributedDataParallel]  # the same chunks, wrapped
    optimizer: MegatronOptimizer
    frozen: list[FrozenPolicy] = field(default_factory=list)  # policies whose log-probs or routing the updates need
    skipped_updates: int = 0  # updates of the whole run that were skipped because they were not finite
    saving: Saving = field(default_factory=Saving)  # the checkpoint being written, if any
    base: str | None = None  # with ``[actor.lora]``: hash of the frozen weights

    @classmethod
    def build(cls, recipe: Recipe, policy_dir: Path, device: torch.device, load: bool = True) -> Actor:
        """Build the model from ``policy_dir`` with Megatron's DDP and distributed optimizer. Collective.

        load: False if `megarl.actor.checkpoint.load` will set the weights. With ``[actor.lora]`` the base weights are
        read from ``policy_dir`` in any case, since checkpoints hold only the adapters.
        """
        models = build_model(read_hf_config(policy_dir), recipe)
        if load or recipe.actor.lora is not None:
            load_hf(models, policy_dir)
        lora.attach(models, recipe)
        routing.install(models)
        replicas, optimizer = wrap(models, recipe)
        base = None if recipe.actor.lora is None else read_info(policy_dir).weights_hash
        actor = cls(recipe, device, models, replicas, optimizer, base=base)
        # else the configuration would keep the optimizer, whose views of float32 parameters keep Megatron's hooks in
        # nodes of autograd, where Python's collector does not look
        weakref.finalize(actor, setattr, models[0].config, "grad_scale_func", None)
        return actor

    def learning_rate(self, update: int) -> float:
        """The learning rate of an update; ``update`` counts those of the whole run, from 1."""
        return self.recipe.optimizer.learning_rate(update, self.recipe.schedule.total_updates)


def train_step(
    actor: Actor,
    micro_batches: list[MicroBatch],
    objective: Objective,
    lr: float,
    detail: bool = False,
    samples: int = 0,
) -> dict[str, Any]:
    """One optimizer update; returns metrics averaged over the whole optimizer batch of all ranks.

    micro_batches: those of this data-parallel rank. detail: whether to add the metrics of
    `megarl.objectives.parts.detail`, and ``muted_tokens``, those that most often get no gradient. samples: number of
    samples in the optimizer batch, to return under ``sample_tokens`` {"counts": [[trained tokens, those without a
    gradient] of each sample]}; 0 leaves that out.
    Outside the last pipeline stage the result has only ``grad_norm``, ``lr`` and what `routing.metrics` gives. Raises
    `NonFiniteUpdate` on all ranks, before anything is applied, if the loss or the gradient is not finite.
    """
    restore_biases = routing.hold_biases(actor.models)
    logs, metrics = compute_gradients(actor, micro_batches, objective, detail, samples)
    norm, finite = _norm_and_finite(actor.optimizer, metrics.get("loss", 0.0), actor.device)
    if not finite:
        restore_biases()
        raise non_finite_update(actor.models, logs, objective, metrics, norm, _batch_group())
    if actor.recipe.optimizer.ess_scaling:
        lr *= math.sqrt(_effective_share(metrics, actor.device))
    _apply_gradients(actor.optimizer, norm, lr)
    metrics |= {"grad_norm": norm, "lr": lr}
    return metrics


def _effective_share(metrics: dict[str, Any], device: torch.device) -> float:
    """``ess/responses``, in [0, 1], on all ranks. Only the last pipeline stage computes it; others receive it."""
    share = metrics.get("ess/responses", 0.0)
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        known = torch.tensor([share], dtype=torch.float64, device=device)
        last = mpu.get_pipeline_model_parallel_last_rank()
        dist.broadcast(known, last, mpu.get_pipeline_model_parallel_group())
        share = known.item()
    return min(1.0, share)  # rounding may make it exceed 1


def with_proximal(actor: Actor, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """The micro-batches with the current policy's log-probs as ``old_logprobs``, by one forward pass. Collective."""
    annotated = micro_batches
    for policy in actor.frozen:  # one of them may choose the experts that the forward pass replays
        annotated = policy.annotate(annotated)
    logs = run_micro_batches(actor.replicas, annotated, collect, forward_only=True)
    if not logs:  # only the last pipeline stage has log-probs, and only its objective needs them
        return micro_batches
    pairs = zip(micro_batches, logs, strict=True)
    return [replace(m, batch=replace(m.batch, old_logprobs=log.batch.logprobs)) for m, log in pairs]


def compute_gradients(
    actor: Actor,
    micro_batches: list[MicroBatch],
    objective: Objective,
    detail: bool = False,
    samples: int = 0,
) -> tuple[list[MicroBatchLog], dict[str, Any]]:
    """Forward and backward passes of an update. Leaves the reduced gradients in the replicas' buffers.

    Returns the log of each micro-batch of this rank, and the metrics of the whole batch. Arguments as `train_step`.
    """
    for policy in actor.frozen:
        micro_batches = policy.annotate(micro_batches)
    statistics = _statistics(actor, micro_batches, objective)
    for replica in actor.replicas:
        replica.zero_grad_buffer()
    actor.optimizer.zero_grad()
    backend, responses = actor.recipe.actor.kernel_backend, actor.recipe.optimizer.ess_scaling
    vocabulary = actor.models[0].true_vocab_size

    def loss(micro_batch: MicroBatch, output: LogprobsAndEntropy) -> Loss:
        """The loss as Megatron wants it: (sum, count, log). Megatron divides by the global count."""
        batch = token_batch(micro_batch, output)
        terms = objective(batch, statistics(batch), backend)
        weights = token_weights(batch.loss_mask, batch.cu_seqlens, objective.aggregation, batch.shard)
        total = (terms.loss * weights).sum()
        count = micro_batch.sequence_count if objective.aggregation == "sequence_mean" else micro_batch.token_count
        batch = batch.detach()
        log = MicroBatchLog(batch, dict(terms.metrics), dict(terms.histograms))
        if responses:
            log.metrics.update(response_metrics(batch))
        if detail:
            metrics, histograms = detailed(batch, terms.kept)
            log.metrics.update(metrics)
            log.histograms.update(histograms, muted_tokens=_count_tokens(micro_batch, terms.kept, vocabulary))
        if samples:
            log.histograms["sample_tokens"] = _count_by_sample(batch, terms.kept, samples)
        # torch.tensor would wait for a copy
        return total, torch.full((), count, dtype=torch.int, device=total.device), log

    logs = run_micro_batches(actor.replicas, micro_batches, loss)
    return logs, _reduce(logs, routing.count(actor.models, actor.device), detail)


def _statistics(actor: Actor, micro_batches: list[MicroBatch], objective: Objective) -> Callable[[TokenBatch], Any]:
    """A function that returns the statistics for the objective of a micro-batch, as ``actor.statistics_scope`` says."""
    backend = actor.recipe.actor.kernel_backend
    if not objective.needs_statistics or actor.recipe.actor.statistics_scope == "micro":
        return lambda batch: None  # the objective then takes the statistics of the micro-batch
    if len(micro_batches) == 1 and mpu.get_pipeline_model_parallel_world_size() == 1:
        # the only micro-batch has all of this rank's log-probs, so no extra forward pass is needed
        return lambda batch: objective.statistics(batch.detach(), _batch_group(), backend)
    logs = run_micro_batches(actor.replicas, micro_batches, collect, forward_only=True)
    if not logs:  # only the last pipeline stage has log-probs, and only its objective needs statistics
        return lambda batch: None
    exact = objective.statistics(TokenBatch.concatenate([log.batch for log in logs]), _batch_group(), backend)
    return lambda batch: exact


def _batch_group() -> dist.ProcessGroup:
    """The ranks that together hold the optimizer batch."""
    return mpu.get_data_parallel_group(with_context_parallel=True)


def _count_by_sample(batch: TokenBatch, kept: torch.Tensor, samples: int) -> torch.Tensor:
    """[samples + 1, 2] int64, for each sample the trained tokens that this rank has, and those of them that are not in
    ``kept`` [N] bool; the last row is for the filler of an empty micro-batch."""
    assert batch.sequence_index is not None
    values = torch.stack([batch.loss_mask, batch.loss_mask & ~kept], 1).long()
    return values.new_zeros(samples + 1, 2).index_add_(0, batch.sequence_index[batch.sequence_ids], values)


def _count_tokens(micro_batch: MicroBatch, kept: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """[2, V] int64, for each token of the vocabulary: how often it is trained on, and how often without a gradient."""
    mask, labels = micro_batch.batch.loss_mask, micro_batch.labels[0]
    if micro_batch.batch.shard is None:
        assert micro_batch.packed.trained is not None
        labels = labels.index_select(0, micro_batch.packed.trained)
    labels = labels[: mask.numel()]
    counts = labels.new_zeros(2, vocabulary)
    counts[0].index_add_(0, labels, mask.long())
    counts[1].index_add_(0, labels, (mask & ~kept).long())
    return counts


def _reduce(logs: list[MicroBatchLog], routed: torch.Tensor | None, detail: bool) -> dict[str, Any]:
    """Means over all micro-batches and data-parallel ranks, with one wait for the device.

    routed: the counts of `routing.count`, already summed over all ranks. detail: whether to add ``muted_tokens``.
    """
    values = [] if routed is None else [routed]
    if logs:  # on the last pipeline stage
        pairs = torch.stack([torch.stack([x for p in log.metrics.values() for x in p]) for log in logs]).sum(0)
        shapes = {name: counts.shape for name, counts in logs[0].histograms.items()}
        counts = torch.stack([torch.cat([c.flatten() for c in log.histograms.values()]) for log in logs]).sum(0)
        dist.all_reduce(pairs, group=_batch_group())
        dist.all_reduce(counts, group=_batch_group())
        values += [pairs, counts]
    if not values:
        return {}
    host = torch.cat([value.flatten().double() for value in values]).cpu()
    parts = iter(host.split([value.numel() for value in values]))
    extra: dict[str, Any] = {}
    if routed is not None:
        extra = routing.metrics(next(parts).view(routed.shape), detail=detail)
    if not logs:
        return extra
    on_host, counted = next(parts).to(pairs.dtype).view(-1, 2), next(parts).to(counts.dtype)
    metrics = {name: tuple(p) for name, p in zip(logs[0].metrics, on_host, strict=True)}
    split = counted.split([shape.numel() for shape in shapes.values()])
    histograms = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), split, strict=True)}
    if detail:
        trained, muted = histograms.pop("muted_tokens")
        most, ids = muted.topk(min(_LISTED, len(muted)))
        extra["muted_tokens"] = {"id": ids.tolist(), "muted": most.tolist(), "trained": trained[ids].tolist()}
    return summarise(metrics, histograms) | extra


def _norm_and_finite(optimizer: MegatronOptimizer, loss: float, device: torch.device) -> tuple[float, bool]:
    """L2 norm of the whole gradient, and whether loss and gradient are finite on all ranks. One wait for the device.

    Only the last pipeline stage knows the loss; elsewhere ``loss`` is 0. (Without Transformer Engine, Megatron-Core's
    own norm waits for the device once a parameter.)
    """
    overflow = optimizer.prepare_grads()
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    old = hasattr(parts[0], "get_main_grads_for_grad_norm")  # Megatron-Core 0.16's name
    name = "get_main_grads_for_grad_norm" if old else "get_grads_for_grad_norm"
    gradients = [gradient for part in parts for gradient in getattr(part, name)()]
    total = torch.zeros(2, device=device)  # squared norm, number of ranks with a non-finite loss or gradient
    if gradients:
        total[0] = torch.stack(torch._foreach_norm(gradients)).square().sum()
    total[1].fill_(float(overflow or not math.isfinite(loss)))
    dist.all_reduce(total, group=parts[0].get_grad_stats_parallel_group())
    square, not_finite = total.tolist()
    norm = math.sqrt(square)
    return norm, math.isfinite(norm) and not not_finite


def _apply_gradients(optimizer: MegatronOptimizer, norm: float, lr: float) -> None:
    """Clip the gradient and step: what MegatronOptimizer.step does after the part that is in `_norm_and_finite`."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        # as Megatron's own scheduler does: wd_mult is 0 for norms and biases
        group["weight_decay"] = optimizer.config.weight_decay * group.get("wd_mult", 1.0)
    clip = optimizer.config.clip_grad
    if 0 < clip < norm:
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            # a gradient of another dtype than its parameter is in the attribute decoupled_grad
            name = "decoupled_grad" if part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"
            gradients = [getattr(parameter, name, None) for parameter in part.get_parameters()]
            torch._foreach_mul_([g for g in gradients if g is not None], clip / (norm + 1e-6))
    optimizer.step_with_ready_grads()
