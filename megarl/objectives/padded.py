"""Objectives on padded batches, for use in other trainers: one row per response, one column per token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megarl.batch import TokenBatch
from megarl.objectives.objective import Objective
from megarl.objectives.parts.terms import Terms


def padded_terms(
    objective: Objective,
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    old_logprobs: torch.Tensor | None = None,
    statistics: Any = None,
    backend: str = "torch",
) -> Terms:
    """The objective's `Terms` of a padded batch: loss, kept and flags [B, R]; the caller averages the loss over the
    whole optimizer batch, and `megarl.objectives.summarise` takes metrics and histograms.

    logprobs [B, R]: of the current policy, with gradient. rollout_logprobs [B, R]: of the policy that generated, as
    the engine returned them. advantages [B], [B, 1] or [B, R]. mask [B, R], of any dtype: non-zero for tokens to train
    on; values elsewhere are ignored. old_logprobs [B, R]: of the proximal policy, for objectives that need it.
    statistics: those of the whole optimizer batch, for objectives that need them (M2PO, BAPO): what
    `padded_statistics` returns for all micro-batches together; None: they are computed from this batch. `UserError` for
    wrong shapes.
    """
    batch = _packed(logprobs, rollout_logprobs, advantages, mask, old_logprobs)
    terms = objective(batch, statistics, backend)
    shape = logprobs.shape
    flags = {name: flag.reshape(shape) for name, flag in terms.flags.items()}
    return replace(terms, loss=terms.loss.reshape(shape), kept=terms.kept.reshape(shape), flags=flags)


def padded_statistics(
    objective: Objective,
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    old_logprobs: torch.Tensor | None = None,
    group: ProcessGroup | None = None,
    backend: str = "torch",
) -> Any:
    """The statistics of the whole optimizer batch that `padded_terms` takes; None for objectives that need none.

    The tensors are those of `padded_terms`, of all responses that this rank trains with one optimizer step, with the
    log-probs before that step; no gradient flows. group: the ranks that share the optimizer batch.
    """
    batch = _packed(logprobs.detach(), rollout_logprobs, advantages, mask, old_logprobs)
    return objective.statistics(batch, group, backend) if objective.needs_statistics else None


def _packed(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    old_logprobs: torch.Tensor | None,
) -> TokenBatch:
    rows, columns = logprobs.shape
    advantages = advantages.reshape(rows, -1).expand(rows, columns)

    def flat(values: torch.Tensor) -> torch.Tensor:
        return values.reshape(-1).float()

    return TokenBatch(
        logprobs=flat(logprobs),
        rollout_logprobs=flat(rollout_logprobs),
        advantages=flat(advantages),
        loss_mask=mask.reshape(-1).bool(),
        cu_seqlens=torch.arange(rows + 1, dtype=torch.int32, device=logprobs.device) * columns,
        old_logprobs=None if old_logprobs is None else flat(old_logprobs),
    )
