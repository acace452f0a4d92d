"""Kinds of clipping: the hard clip (no gradient outside the bounds), dual clip, and two clips that keep every token's
gradient with a bounded weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megarl.batch import TokenBatch
from megarl.kernels.constants import SEQUENCE_LOG_RATIO_LIMIT


def hard_clip(
    ratio: torch.Tensor, advantages: torch.Tensor, ratio_min: float | torch.Tensor, ratio_max: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """min(r A, clip(r, ratio_min, ratio_max) A) [T], and [T] bool where the clipped branch is strictly smaller.

    These are the tokens with A > 0 and r > ratio_max, or A < 0 and r < ratio_min. Their value does not depend on r, so
    they get no gradient.
    """
    ratio_value, advantages = ratio.detach(), advantages.detach()
    clipped = ((advantages > 0) & (ratio_value > ratio_max)) | ((advantages < 0) & (ratio_value < ratio_min))
    bounded = torch.clamp(ratio_value, ratio_min, ratio_max)  # type: ignore[arg-type]
    return torch.where(clipped, bounded, ratio) * advantages, clipped


def preserving_clip(
    ratio: torch.Tensor, advantages: torch.Tensor, ratio_min: float, ratio_max: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The value of `hard_clip` [T], and [T] bool where it is clipped; the gradient there is bound * A * grad log pi."""
    value, clipped = hard_clip(ratio, advantages, ratio_min, ratio_max)
    # ratio / sg(ratio) is 1 with the gradient of log pi
    return torch.where(clipped, value.detach() * (ratio / ratio.detach()), value), clipped


def prior_bounds(
    batch: TokenBatch, eps_low: float, eps_high: float, ratio_max: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """DCPO's clip bounds of each token [T], from its probability q under the behaviour policy.

    They solve |(r - 1) r q| = eps for the ratio r: the rarer the token, the wider the bounds.
    """
    rollout = torch.where(batch.loss_mask, batch.rollout_logprobs.detach(), 0)
    inverse = (-rollout).clamp(0, SEQUENCE_LOG_RATIO_LIMIT).exp()  # 1 / q
    low = 0.5 + 0.5 * (1 - 4 * eps_low * inverse).clamp(min=0).sqrt()
    high = 0.5 + 0.5 * (1 + 4 * eps_high * inverse).sqrt()
    return low, high.clamp(max=ratio_max)


def soft_clip(
    ratio: torch.Tensor, batch: TokenBatch, ratio_min: float, ratio_max: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """sg(clip(r, ratio_min, ratio_max)) A log pi [T] and [T] bool where the clip changes the weight.

    Every trained token keeps a gradient, through log pi alone.
    """
    detached = ratio.detach()
    saturated = (detached < ratio_min) | (detached > ratio_max)
    logprobs = torch.where(batch.loss_mask, batch.logprobs, 0)
    return detached.clamp(ratio_min, ratio_max) * batch.advantages.detach() * logprobs, saturated


def dual_clip(value: torch.Tensor, advantages: torch.Tensor, ratio_c: float) -> tuple[torch.Tensor, torch.Tensor]:
    """max(value, ratio_c A) for A < 0, value elsewhere (arXiv:1912.09729), and [T] bool where the bound is strictly
    larger, so that there is no gradient.

    value [T]: a clipped objective of the form ratio * A. The bound limits the loss of tokens with A < 0 and a large
    ratio.
    """
    advantages = advantages.detach()
    capped = (advantages < 0) & (value.detach() < ratio_c * advantages)
    return torch.where(capped, ratio_c * advantages, value), capped


@dataclass(frozen=True)
class RatioBounds:
    """BAPO's clip bounds of a whole batch, and the positive and negative contributions at them; all 0-d tensors."""

    ratio_min: torch.Tensor
    ratio_max: torch.Tensor
    positive: torch.Tensor | None = None
    negative: torch.Tensor | None = None

    @property
    def positive_share(self) -> torch.Tensor:
        """Positive contribution divided by the sum of both contributions; 0 for an empty batch."""
        assert self.positive is not None and self.negative is not None, "these bounds were not searched for"
        whole = self.positive + self.negative
        return self.positive / torch.where(whole > 0, whole, 1)
