"""Divergences of two policies at a position where only the sampled token's probabilities are known: all other tokens of
the vocabulary are counted as one."""

from __future__ import annotations

import torch

from megarl.batch import TokenBatch
from megarl.kernels.constants import SMALLEST_REST


def binary_tv(log_ratio: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """[T] total variation |p - q|; p = q exp(log_ratio) under the current policy, q under the behaviour policy."""
    _, q = _behaviour(batch)
    return (q * torch.expm1(log_ratio.detach())).abs()


def binary_kl(log_ratio: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """[T] KL(behaviour || current) in nats."""
    l = log_ratio.detach()
    log_q, q = _behaviour(batch)
    rest_q, rest_p = (-torch.expm1(x.clamp(max=0)) + SMALLEST_REST for x in (log_q, log_q + l))
    return -q * l + rest_q * (rest_q / rest_p).log()


def _behaviour(batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    log_q = torch.where(batch.loss_mask, batch.rollout_logprobs.detach(), 0).clamp(max=0)
    return log_q, log_q.exp()
