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
    merged: dict[int, dict[str, Any]] = {}
    for sequence, tensor, bad, logprobs, whole in (x for rank in gathered for log in rank for x in log):
        entry = merged.setdefault(sequence, {"bad": {}, "logprobs": {}, "whole": whole})
        entry["logprobs"] |= logprobs
        if tensor:
            entry["bad"].setdefault(tensor, []).extend(bad)
    order = [*_INPUTS, "loss"]
    chosen = {s: e for s, e in merged.items() if e["bad"]} or merged
    offenders = []
    for sequence, entry in sorted(chosen.items()):
        tensor = min(entry["bad"], key=order.index, default="gradient")
        bad = sorted(entry["bad"].get(tensor, []))
        offenders.append(Offender(sequence, tensor, bad, dict(sorted(entry["logprobs"].items())), entry["whole"]))
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


def _examine(batch: TokenBatch, objective: Objective) -> list[tuple[int, str, list[int], Any, bool]]:
    """For each sequence of this rank: (index in the optimizer batch, first tensor that is not finite or "", positions
    where it is not, log-probs by position, whether positions count input tokens)."""
    mask, ids, positions = batch.loss_mask, batch.sequence_ids, batch.positions
    assert batch.sequence_index is not None
    bad = {name: mask & ~torch.isfinite(getattr(batch, name)) for name in _INPUTS if getattr(batch, name) is not None}
    bad["loss"] = mask & ~_loss_is_finite(batch, objective)
    examined = []
    for local, sequence in enumerate(batch.sequence_index.tolist()):
        mine = (ids == local) & mask
        logprobs = dict(zip(positions[mine].tolist(), batch.logprobs[mine].tolist(), strict=True))
        tensor = next((name for name, where in bad.items() if bool((where & mine).any())), "")
        where = positions[bad[tensor] & mine].tolist() if tensor else []
        examined.append((sequence, tensor, where, logprobs, batch.with_prompts))
    return examined


def _loss_is_finite(batch: TokenBatch, objective: Objective) -> torch.Tensor:
    """[T] bool: whether the loss of each token and its derivative by the token's log-prob are finite."""
    logprobs = batch.logprobs.detach().requires_grad_()
    loss = objective(replace(batch, logprobs=logprobs)).loss
    if not loss.requires_grad:
        return torch.isfinite(loss)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return torch.isfinite(loss.detach()) & torch.isfinite(gradient)
