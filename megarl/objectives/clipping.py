"""Hard clip (the gradient stops outside) and soft clip (the weight saturates, the gradient stays)."""

from __future__ import annotations

import torch


def hard_clip(
    ratio: torch.Tensor, advantages: torch.Tensor, ratio_min: float | torch.Tensor, ratio_max: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(r A, clip(r, ratio_min, ratio_max) A) [T] and [T] bool where the clipped branch is strictly smaller.

    There the value is constant in r: no gradient. It is active for A > 0 and r > ratio_max, and A < 0 and r < ratio_min.
    """
    clipped = ((advantages > 0) & (ratio > ratio_max)) | ((advantages < 0) & (ratio < ratio_min))
    bounded = torch.clamp(ratio.detach(), ratio_min, ratio_max)  # type: ignore[call-overload]
    return torch.where(clipped, bounded, ratio) * advantages, clipped


def soft_clip(
    ratio: torch.Tensor, advantages: torch.Tensor, logprobs: torch.Tensor, ratio_min: float, ratio_max: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """sg(clip(r, ratio_min, ratio_max)) A log pi [T] and [T] bool where the clip changes the weight.

    Every token keeps a gradient, through log pi alone.
    """
    detached = ratio.detach()
    saturated = (detached < ratio_min) | (detached > ratio_max)
    return detached.clamp(ratio_min, ratio_max) * advantages * logprobs, saturated
