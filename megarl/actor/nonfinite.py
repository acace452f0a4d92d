"""An update whose loss or gradient is not finite: finds the sequences that cause it, over all ranks of the batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from megarl.actor.schedule import MicroBatchLog
from megarl.batch import TokenBatch
from megarl.errors import UserError
from megarl.objectives import Objective, WithOptions

_INPUTS = ("rollout_logprobs", "advantages", "logprobs", "old_logprobs", "ref_logprobs", "entropy")


@dataclass(frozen=True)
class Offender:
    """A sequence of the optimizer batch that is not finite.

    Positions count input tokens under context parallelism and response tokens otherwise; `megarl.phases.optimize` turns
    both into response tokens.
    """

    sequence: int  # place in the optimizer batch
    tensor: str  # the first one that is not finite there; "gradient": only the gradient of the model is not
    positions: list[int]  # where it is not
    logprobs: dict[int, float]  # the actor's log-prob at every position with a label
    whole_sequences: bool  # positions count input tokens


class NonFiniteUpdate(UserError):
    """Loss or gradient is not finite; the update was not applied. The last pipeline stage knows the ``offenders``."""

    def __init__(self, message: str, offenders: list[Offender]) -> None:
        super().__init__(message)
        self.offenders = offenders


def non_finite_update(
    logs: list[MicroBatchLog], objective: Objective | WithOptions, metrics: dict[str, float], norm: float, group: Any
) -> NonFiniteUpdate:
    """The error that all ranks raise together; collective over the ranks of the batch."""
    what = f"gradient norm is {norm}"
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
    found = {s: e for s, e in merged.items() if e["bad"]} or merged
    offenders = []
    for sequence, entry in sorted(found.items()):
        tensor = min(entry["bad"], key=order.index, default="gradient")
        bad = sorted(entry["bad"].get(tensor, []))
        offenders.append(Offender(sequence, tensor, bad, dict(sorted(entry["logprobs"].items())), entry["whole"]))
    first = offenders[0]
    return NonFiniteUpdate(
        f"{what}; the update was not applied. {first.tensor} is not finite in sequence {first.sequence} of the batch"
        f" ({len(offenders)} such sequences)",
        offenders,
    )


def _examine(batch: TokenBatch, objective: Objective | WithOptions) -> list[tuple[int, str, list[int], Any, bool]]:
    """(sequence, first tensor that is not finite or "", positions, log-probs, whether positions count input tokens)."""
    mask, ids, place = batch.loss_mask, batch.sequence_ids, batch.positions
    assert batch.sequence_index is not None
    bad = {name: mask & ~torch.isfinite(getattr(batch, name)) for name in _INPUTS if getattr(batch, name) is not None}
    bad["loss"] = mask & ~_loss_is_finite(batch, objective)
    found = []
    for local, sequence in enumerate(batch.sequence_index.tolist()):
        mine = (ids == local) & mask
        logprobs = dict(zip(place[mine].tolist(), batch.logprobs[mine].tolist(), strict=True))
        tensor = next((name for name, where in bad.items() if bool((where & mine).any())), "")
        where = place[bad[tensor] & mine].tolist() if tensor else []
        found.append((sequence, tensor, where, logprobs, batch.shard is not None))
    return found


def _loss_is_finite(batch: TokenBatch, objective: Objective | WithOptions) -> torch.Tensor:
    """[T] bool: the loss of each token and its derivative."""
    logprobs = batch.logprobs.detach().requires_grad_()
    loss = objective(replace(batch, logprobs=logprobs)).loss
    if not loss.requires_grad:
        return torch.isfinite(loss)
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return torch.isfinite(loss.detach()) & torch.isfinite(gradient)
