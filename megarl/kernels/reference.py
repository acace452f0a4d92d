"""Readable definitions of the fused operations: slow, memory-hungry, and right. Tests compare the kernels with them."""

from __future__ import annotations

from itertools import pairwise

import torch


def linear_logprob(
    hidden: torch.Tensor,  # [N, H]
    weight: torch.Tensor,  # [V, H], the whole vocabulary and perhaps padding rows
    targets: torch.Tensor,  # [N] int64
    temperature: float = 1.0,
    vocab_size: int | None = None,  # rows beyond it are padding
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy in nats of softmax(hidden weight^T / temperature), both [N].

    The arithmetic is float32 (float64 for float64 inputs).
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.to(dtype) @ weight[:vocab_size].to(dtype).t() / temperature  # [N, V]
    logprobs = logits.log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropy


def prefix_min(log_ratio: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[T] float32: minimum of the log-ratios of the earlier trained tokens of the same sequence; 0 where there is none.

    log_ratio [T] float32, mask [T] bool (True = trained), cu_seqlens [S+1]. A token with mask False influences
    nothing, whatever its value. A trained NaN makes every later token of its sequence NaN.
    """
    out = torch.zeros_like(log_ratio)
    bounds = cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        for t in range(start, end):
            earlier = log_ratio[start:t][mask[start:t]]
            out[t] = earlier.min() if earlier.numel() else 0.0
    return out
