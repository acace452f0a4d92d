"""Padded batches of other trainers, one row per response and one column per token, as batches of objectives."""

from __future__ import annotations

import torch

from megarl.batch import TokenBatch


def padded_batch(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    old_logprobs: torch.Tensor | None = None,
) -> TokenBatch:
    """The packed batch of B * R tokens: an objective's ``loss`` of it, and ``kept``, are reshaped to [B, R].

    logprobs [B, R]: of the current policy, with gradient. rollout_logprobs [B, R]: of the policy that generated, as
    the engine returned them. advantages [B], [B, 1] or [B, R]. mask [B, R], of any dtype: non-zero for tokens to train
    on; values elsewhere are ignored. old_logprobs [B, R]: of the proximal policy, for objectives that need it.
    """
    rows, columns = logprobs.shape
    return TokenBatch(
        logprobs=logprobs.reshape(-1).float(),
        rollout_logprobs=rollout_logprobs.reshape(-1).float(),
        advantages=advantages.reshape(rows, -1).expand(rows, columns).reshape(-1).float(),
        loss_mask=mask.reshape(-1).bool(),
        cu_seqlens=torch.arange(rows + 1, dtype=torch.int32, device=logprobs.device) * columns,
        old_logprobs=None if old_logprobs is None else old_logprobs.reshape(-1).float(),
    )
