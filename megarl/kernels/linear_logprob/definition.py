"""The readable definition of `linear_logprob`: slow, memory-hungry, and right. Tests compare the backends with it."""

from __future__ import annotations

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
