"""Finds the sequences of the batch, on any rank, that made the loss or the gradient of an update non-finite."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megarl.actor.schedule import MicroBatchLog
from megarl.batch import TokenBatch
from megarl.errors import UserError
from megarl.objectives import Objective

_INPUTS = ("rollout_logprobs", "advantages", "logprobs", "old_logprobs", "ref_logprobs", "entropy")


@dataclass(frozen=True)
class Offender:
    """A sequence of the optimizer batch that made an update non-finite or, if only the gradient is, may have.

    Positions count input tokens where sequences include their prompts, and response tokens otherwise;
    `megarl.phases.samples.describe` turns both into response tokens.
    """

    sequence: int  # index in the optimizer batch
    tensor: str  # the first non-finite one of _INPUTS and "loss"; "gradient": they are finite, the model's gradient not
    positions: list[int]  # positions where this tensor is not finite
    logprobs: dict[int, float]  # position -> the actor's log-prob, for every trained token
    whole_sequences: bool  # True: positions count input tokens


class NonFiniteUpdate(UserError):
    """Loss or gradient is not finite, so the update was not applied. ``offenders`` is empty outside the last pipeline
    stage."""

    def __init__(self, message: str, offenders: list[Offender]) -> None:
        super().__init__(message)
        self.offenders = offenders


def non_finite_update(
    models: list[Any],
    logs: list[MicroBatchLog],
    objective: Objective,
    metrics: dict[str, float],
    norm: float,
    group: Any,
) -> NonFiniteUpdate:
    """The error that all ranks raise together. Collective over ``group``, the ranks that hold the batch.

    models: this rank's chunks of the model, with their gradients.
    """
    what = f"gradient norm is {norm}{_where(models)}"
    if "loss" in metrics:
        what = f"loss is {metrics['loss']}, {what}"
    if not logs:
        return NonFiniteUpdate(f"{what}; the update was not applied", [])
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, [_examine(log.batch, objective) for log in logs], group=group)
    merged: dict[int, dict[str, dict[int, Any]]] = {}
    for tensor, sequence, values in (found for rank in gathered for log in rank for found in log):
        merged.setdefault(sequence, {}).setdefault(tensor, {}).update(values)
    offenders = []
    for sequence, tensors in sorted(merged.items()):
        logprobs = tensors.pop("of the actor")
        bad = {name: [i for i, finite in sorted(values.items()) if not finite] for name, values in tensors.items()}
        tensor = next((name for name, positions in bad.items() if positions), "gradient")
        whole = logs[0].batch.with_prompts
        if logprobs:  # none in sequences that do not train
            offenders.append(
                Offender(sequence, tensor, bad.get(tensor, []), dict(sorted(logprobs.items())), whole_sequences=whole)
            )
    offenders = [offender for offender in offenders if offender.tensor != "gradient"] or offenders
    first = offenders[0]
    return NonFiniteUpdate(
        f"{what}; the update was not applied. {first.tensor} is not finite in sequence {first.sequence} of the batch"
        f" ({len(offenders)} such sequences)",
        offenders,
    )


def _where(models: list[Any]) -> str:
    """The parameters of this rank whose gradient is not finite, for a message."""
    every = [(name, p.main_grad) for model in models for name, p in model.named_parameters() if p.requires_grad]
    bad = [name for name, gradient in every if not bool(torch.isfinite(gradient).all())]
    return f", not finite in {len(bad)} of {len(every)} parameters, the first being {bad[0]}" if bad else ""


def _examine(batch: TokenBatch, objective: Objective) -> list[tuple[str, int, dict[int, Any]]]:
    """(name, index in the optimizer batch, values by position) for each sequence of this rank: its log-probs "of the
    actor", and whether each of `_INPUTS` and the loss is finite."""
    values = {"of the actor": batch.logprobs}
    values |= {name: torch.isfinite(x) for name in _INPUTS if (x := getattr(batch, name)) is not None}
    values["loss"] = _loss_is_finite(batch, objective)
    return [(name, *found) for name, tensor in values.items() for found in batch.by_sequence(tensor).items()]


def _loss_is_finite(batch: TokenBatch, objective: Objective) -> torch.Tensor:
    """[T] bool: whether the loss of each token and its derivative by the token's log-prob are finite."""
    logprobs = batch.logprobs.detach().requires_grad_()
    loss = objective(replace(batch, logprobs=logprobs)).loss
    if not loss.requires_grad:
        return torch.isfinite(loss)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return torch.isfinite(loss.detach()) & torch.isfinite(gradient)
