"""Packed micro-batches through Megatron's forward-backward schedule, with or without a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func

from megarl.actor import routing
from megarl.actor.packing import MicroBatch
from megarl.batch import TokenBatch
from megarl.objectives import Metric


@dataclass(frozen=True)
class MicroBatchLog:
    """What a micro-batch leaves behind on the last pipeline stage."""

    batch: TokenBatch  # detached
    metrics: dict[str, Metric]
    histograms: dict[str, torch.Tensor]


LogprobsAndEntropy = tuple[torch.Tensor, torch.Tensor]  # [N], [N]
Loss = tuple[torch.Tensor, torch.Tensor, MicroBatchLog]


def run_micro_batches(
    models: Sequence[torch.nn.Module],
    micro_batches: Sequence[MicroBatch],
    loss: Callable[[MicroBatch, LogprobsAndEntropy], Loss],
    forward_only: bool = False,
    routed: list[routing.Experts] | None = None,
) -> list[MicroBatchLog]:
    """All micro-batches through Megatron's schedule; the log of each comes back on the last pipeline stage.

    routed: one dict a micro-batch, filled with what the routers of this rank choose (see `routing.install`).
    """

    def forward_step(numbered: Iterator[tuple[int, MicroBatch]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        number, batch = next(numbered)
        routing.begin(model, batch.routed_experts)
        output = model(batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=batch.packed)
        chosen = routing.end(model, batch.routed_experts, output)
        if routed is not None:
            routed[number] |= chosen
        return output, partial(loss, batch)

    iterators = [enumerate(micro_batches) for _ in models]
    several = len(models) > 1
    with torch.set_grad_enabled(not forward_only):  # the schedule alone would build the graph of a forward pass
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
    logprobs, entropy = output
    packed = micro_batch.packed
    if packed.shard is not None:
        assert packed.trained is not None
        logprobs, entropy = (_spread(x, packed.trained, micro_batch.loss_mask.numel()) for x in output)
    return TokenBatch(
        logprobs=logprobs,
        rollout_logprobs=micro_batch.rollout_logprobs,
        advantages=micro_batch.advantages,
        loss_mask=micro_batch.loss_mask,
        cu_seqlens=micro_batch.cu_seqlens,
        # one update a batch: without a frozen policy the proximal one is where the update starts
        old_logprobs=logprobs.detach() if micro_batch.old_logprobs is None else micro_batch.old_logprobs,
        ref_logprobs=micro_batch.ref_logprobs,
        entropy=entropy,
        sequence_index=micro_batch.sequence_index,
        shard=packed.shard,
    )


def _spread(values: torch.Tensor, places: torch.Tensor, tokens: int) -> torch.Tensor:
    """[N] values of the trained labels to their places among all ``tokens`` of this rank; 0 elsewhere."""
    return values.new_zeros(tokens).index_copy(0, places, values)


def collect(micro_batch: MicroBatch, output: LogprobsAndEntropy) -> Loss:
    """The loss of a forward-only pass that is after the log-probs alone."""
    zero = torch.zeros((), device=output[0].device)
    return zero, zero.int(), MicroBatchLog(token_batch(micro_batch, output).detach(), {}, {})
