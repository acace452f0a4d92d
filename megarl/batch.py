"""Packed token batches: the one data structure that objectives, actor and phases share. No padding anywhere."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from megarl.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_FLOATS = ("logprobs", "rollout_logprobs", "advantages", "old_logprobs", "ref_logprobs", "entropy")


@dataclass(frozen=True)
class ContextShard:
    """Which part of its sequences a rank holds under context parallelism (Megatron's zigzag over packed sequences).

    Every sequence is cut into ``2 * size`` chunks of equal length. Rank r holds chunks r and 2 * size - 1 - r, in this
    order, so every rank has the same ``cu_seqlens``, and each sequence's local length is even.
    """

    group: ProcessGroup  # the context-parallel ranks, in the order of `rank`
    rank: int
    size: int


@dataclass(frozen=True)
class TokenBatch:
    """T tokens of S sequences on one packed axis.

    Tokens with ``loss_mask`` False (prompt, tool output, padding) neither count nor influence anything; their other
    values may be arbitrary. Log-probs are natural logarithms of the sampled tokens' probabilities, stored in float32:
    float16 moves ratios by up to .8 %, bfloat16 by 6 %.
    """

    logprobs: torch.Tensor  # [T] float32, current policy, carries gradient
    rollout_logprobs: torch.Tensor  # [T] float32, behaviour policy, stored by the engine
    advantages: torch.Tensor  # [T] float32
    loss_mask: torch.Tensor  # [T] bool, True = trains
    cu_seqlens: torch.Tensor  # [S+1] int32, sequence s is tokens cu_seqlens[s] : cu_seqlens[s+1] (of this shard)
    old_logprobs: torch.Tensor | None = None  # [T] float32, proximal policy, recomputed by the actor
    ref_logprobs: torch.Tensor | None = None  # [T] float32, reference policy of the KL term
    entropy: torch.Tensor | None = None  # [T] float32 nats, of the current policy, carries gradient if it is trained
    sequence_index: torch.Tensor | None = None  # [S] int64, place in the optimizer batch, < 2^22; decides ties alone
    shard: ContextShard | None = None  # None: whole sequences

    def detach(self) -> TokenBatch:
        """The same batch without gradient, for statistics."""
        return replace(self, logprobs=self.logprobs.detach(), entropy=_detach(self.entropy))

    @staticmethod
    def concatenate(batches: list[TokenBatch]) -> TokenBatch:
        """One batch from the micro-batches of a rank; all of the same shard and with the same optional fields."""
        merged = {}
        for f in fields(TokenBatch):
            parts = [getattr(b, f.name) for b in batches]
            if f.name == "shard" or parts[0] is None:
                merged[f.name] = parts[0]
            elif f.name == "cu_seqlens":
                merged[f.name] = torch.cat([parts[0][:1], *(p.diff() for p in parts)]).cumsum(0, dtype=parts[0].dtype)
            else:
                merged[f.name] = torch.cat(parts)
        return TokenBatch(**merged)

    def validate(self) -> TokenBatch:
        """Return self, or raise `UserError` naming tensor, index and value. Waits for the device."""
        length = self.logprobs.numel()
        for name in (*_FLOATS, "loss_mask"):
            _check_vector(name, getattr(self, name), length)
        _check_boundaries(self.cu_seqlens, length, self.shard)
        if self.sequence_index is not None and self.sequence_index.shape != (self.cu_seqlens.numel() - 1,):
            shape = tuple(self.sequence_index.shape)
            raise UserError(f"TokenBatch.sequence_index has shape {shape}; expected [{self.cu_seqlens.numel() - 1}]")
        for name in _FLOATS:
            _check_finite(name, getattr(self, name), self.loss_mask)
        return self


def _detach(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach()


def _check_vector(name: str, tensor: Any, length: int) -> None:
    if tensor is None:
        if name in _FLOATS[3:]:
            return
        raise UserError(f"TokenBatch.{name} is None; it is required")
    if tensor.dim() != 1:
        raise UserError(f"TokenBatch.{name} has shape {tuple(tensor.shape)}; expected one packed axis [T]")
    if tensor.numel() != length:
        raise UserError(
            f"TokenBatch.{name} has {tensor.numel()} tokens, but logprobs has {length}; expected the same T"
        )
    wanted = (torch.bool,) if name == "loss_mask" else (torch.float32, torch.float64)
    if tensor.dtype not in wanted:
        raise UserError(f"TokenBatch.{name} is {tensor.dtype}; expected {wanted[0]}")


def _check_boundaries(cu_seqlens: torch.Tensor, length: int, shard: ContextShard | None) -> None:
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        shape = tuple(cu_seqlens.shape)
        raise UserError(f"TokenBatch.cu_seqlens is {cu_seqlens.dtype} {shape}; expected int32 [S+1]")
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0:
        raise UserError(f"TokenBatch.cu_seqlens[0] is {bounds[0]}; the first sequence must start at token 0")
    for i, (start, end) in enumerate(pairwise(bounds), start=1):
        if end < start:
            raise UserError(f"TokenBatch.cu_seqlens[{i}] is {end}, less than cu_seqlens[{i - 1}] = {start}")
        if shard is not None and (end - start) % 2:
            raise UserError(
                f"TokenBatch.cu_seqlens[{i}] is {end}: sequence {i - 1} has {end - start} local tokens, but a zigzag "
                f"shard holds two chunks of equal length; pad sequences to a multiple of {2 * shard.size} tokens"
            )
    if bounds[-1] != length:
        raise UserError(
            f"TokenBatch.cu_seqlens[{len(bounds) - 1}] is {bounds[-1]}, but there are {length} tokens; "
            "the boundaries must cover every token"
        )


def _check_finite(name: str, tensor: torch.Tensor | None, loss_mask: torch.Tensor) -> None:
    if tensor is None:
        return
    bad = (~torch.isfinite(tensor.detach()) & loss_mask).nonzero()
    if bad.numel():
        index = int(bad[0])
        value = float(tensor.detach()[index])
        raise UserError(
            f"TokenBatch.{name}[{index}] is {value}; trained tokens need finite values ({bad.numel()} are not)"
        )
