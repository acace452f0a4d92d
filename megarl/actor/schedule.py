"""Runs packed micro-batches through Megatron's forward-backward schedule, with or without a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func

from megarl.actor import routing
from megarl.actor.packing import MicroBatch
from megarl.batch import TokenBatch
from megarl.heartbeats import beat
from megarl.objectives import Metric


@dataclass(frozen=True)
class MicroBatchLog:
    """Results of one micro-batch, as the last pipeline stage keeps them until the end of the update."""

    batch: TokenBatch  # detached
    metrics: dict[str, Metric]
    histograms: dict[str, torch.Tensor]


LogprobsAndEntropy = tuple[torch.Tensor, torch.Tensor]  # [N], [N], as `PolicyModel` returns them
Loss = tuple[torch.Tensor, torch.Tensor, MicroBatchLog]  # sum of the losses, count to divide by, log


def run_micro_batches(
    models: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    loss: Callable[[MicroBatch, LogprobsAndEntropy], Loss],
    forward_only: bool = False,
    routed: list[routing.Experts] | None = None,
) -> list[MicroBatchLog]:
    """Run all micro-batches through Megatron's schedule. Returns their logs on the last pipeline stage, elsewhere [].

    routed: an output, one dict for each micro-batch, to which the experts that this rank's routers choose are added;
    needs `routing.install`.
    """

    def forward_step(numbered: Iterator[tuple[int, MicroBatch]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        number, batch = next(numbered)
        beat("micro-batch")
        routing.begin(model, batch.routed_experts, None if forward_only else batch.trained_inputs)
        output = model(batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=batch.packed)
        chosen = routing.end(model, batch.routed_experts, output)
        if routed is not None:
            routed[number] |= chosen
        return output, partial(loss, batch)

    iterators = [enumerate(micro_batches) for _ in models]
    several = len(models) > 1
    with torch.set_grad_enabled(not forward_only):  # with forward_only the schedule would still build a graph
        logs: list[MicroBatchLog] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if several else iterators[0],
            model=list(models) if several else models[0],
            num_microbatches=len(micro_batches),
            seq_length=micro_batches[0].tokens.size(1) * mpu.get_context_parallel_world_size(),
            micro_batch_size=1,
            forward_only=forward_only,
        )
    return logs


def token_batch(micro_batch: MicroBatch, output: LogprobsAndEntropy) -> TokenBatch:
    """The objective's batch of a micro-batch, with the model's log-probs and entropy filled in."""
    batch, packed = micro_batch.batch, micro_batch.packed
    logprobs, entropy = output
    if batch.shard is not None:
        assert packed.trained is not None
        size, trained = batch.loss_mask.numel(), packed.trained
        logprobs, entropy = (x.new_zeros(size).index_copy(0, trained, x) for x in output)
    # by default the proximal policy is the current one, which is the policy before this update
    old_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    return replace(batch, logprobs=logprobs, entropy=entropy, old_logprobs=old_logprobs)


def collect(micro_batch: MicroBatch, output: LogprobsAndEntropy) -> Loss:
    """In place of a loss in forward-only passes: zero, and the log with the log-probs, which is all they are for."""
    zero = torch.zeros((), device=output[0].device)
    return zero, zero.int(), MicroBatchLog(token_batch(micro_batch, output).detach(), {}, {})
