"""Random packed batches with what tends to break objectives: ties, empty masks, one-token responses, extreme ratios."""

from __future__ import annotations

import torch

from megarl.batch import TokenBatch
from megarl.objectives import OBJECTIVES

# every objective, with its settings
VARIANTS = [(name, {}) for name in OBJECTIVES] + [(name, {"variant": "released"}) for name in ("m2po", "bapo")]
KINDS = ("continuous", "ties", "extreme", "short", "zero_advantages", "empty_masks", "on_policy", "heavy_tails")


def random_batch(seed: int, kind: str | None = None) -> TokenBatch:
    """A float32 batch of at most 7 responses of at most 9 tokens. Untrained tokens hold NaN where seed % 3 is 1."""
    kind = kind or KINDS[seed % len(KINDS)]
    g = torch.Generator().manual_seed(seed)
    responses = int(torch.randint(1, 8, (), generator=g))
    longest = 2 if kind == "short" else 10
    lengths = torch.randint(0 if kind == "empty_masks" else 1, longest, (responses,), generator=g)
    tokens = int(lengths.sum())
    logprobs = -torch.rand(tokens, generator=g) * 4
    spread = {"on_policy": 0.0, "heavy_tails": 1.0}.get(kind, 0.4)
    shift = torch.randn(tokens, generator=g) * spread
    if kind == "heavy_tails":
        shift = shift**3
    rollout = logprobs - shift
    if kind == "extreme":  # log-ratios up to +-40, some beyond the clamp
        logprobs, rollout = (-40 * torch.rand(tokens, generator=g) ** 2 for _ in range(2))
    if kind == "ties":  # multiples of 1/8 subtract exactly, so equal log-ratios are equal bit for bit
        logprobs = (logprobs * 8).round() / 8
        rollout = logprobs - (shift * 8).round() / 8
    rollout = rollout.clamp(max=0)
    advantages = torch.randn(responses, generator=g)
    if kind == "zero_advantages":
        advantages = torch.where(torch.rand(responses, generator=g) < 0.6, 0.0, advantages)
    if kind == "ties":
        advantages = advantages.sign()
    advantages = advantages.repeat_interleave(lengths)
    mask = torch.rand(tokens, generator=g) < (0.4 if kind == "empty_masks" else 0.85)
    if kind == "empty_masks" and seed % 3 == 0:
        mask = torch.zeros_like(mask)
    old = rollout + 0.1 * torch.randn(tokens, generator=g)
    ref = logprobs + 0.3 * torch.randn(tokens, generator=g)
    if seed % 3 == 1:
        for tensor in (logprobs, rollout, advantages, old, ref):
            tensor[~mask] = torch.nan
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    return TokenBatch(
        logprobs.requires_grad_(), rollout, advantages, mask, cu_seqlens, old_logprobs=old, ref_logprobs=ref
    )
