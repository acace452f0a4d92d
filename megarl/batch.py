"""`TokenBatch`, the packed batch that objectives, actor and phases share, and `ContextShard`, the part of each sequence
that a context-parallel rank holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from megarl.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from torch.distributed import ProcessGroup

LOWEST_LOGPROB = -1e4  # in place of -inf; any finite one far below those of a float32 softmax would do
_FLOATS = ("logprobs", "rollout_logprobs", "advantages", "old_logprobs", "ref_logprobs", "entropy")


@dataclass(frozen=True)
class ContextShard:
    """Which part of every sequence a rank holds under context parallelism: Megatron's zigzag over packed sequences.

    A sequence is cut into ``2 * size`` chunks of equal length. Rank r holds chunks r and 2 * size - 1 - r, in this
    order, so that under a causal mask all ranks have the same work. Each sequence has the same number of tokens on
    every rank, so all ranks have the same ``cu_seqlens``.
    """

    group: ProcessGroup  # the context-parallel ranks, in the order of `rank`
    rank: int
    size: int

    @property
    def chunks(self) -> int:
        """Number of chunks that a sequence is cut into; the sequence's length is a multiple of it."""
        return 2 * self.size

    @property
    def held(self) -> tuple[int, int]:
        """The two chunks of every sequence that this rank holds, in the order in which it holds them."""
        return self.rank, self.chunks - 1 - self.rank

    def held_tokens(self, lengths: np.ndarray) -> np.ndarray:
        """Indices [T / size] of this rank's tokens on the packed axis of whole sequences, which have lengths [S]."""
        import numpy as np  # here: objectives and their batches need torch alone

        starts, chunk_lengths = np.cumsum(lengths) - lengths, lengths // self.chunks
        return np.concatenate(
            [
                start + chunk * length + np.arange(length)
                for start, length in zip(starts, chunk_lengths, strict=True)
                for chunk in self.held
            ]
        )

    def gathered_tokens(self, lengths: np.ndarray) -> list[np.ndarray]:
        """For each sequence, of ``lengths`` [S]: the indices of its tokens, in order, among those gathered from all
        ranks, rank by rank."""
        import numpy as np

        starts, chunk_lengths = (np.cumsum(lengths) - lengths) // self.size, lengths // self.chunks
        total = int(lengths.sum()) // self.size
        owners = [(c, 0) if c < self.size else (self.chunks - 1 - c, 1) for c in range(self.chunks)]
        return [
            np.concatenate([r * total + start + half * length + np.arange(length) for r, half in owners])
            for start, length in zip(starts, chunk_lengths, strict=True)
        ]

    def chunk_boundaries(self, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """[S + 1] boundaries of this rank's tokens by sequence -> [2 S + 1] boundaries by chunk, same dtype."""
        middle = cu_seqlens[:-1] + cu_seqlens.diff() // 2
        return torch.cat([torch.stack([cu_seqlens[:-1], middle], 1).flatten(), cu_seqlens[-1:]])

    def chunk_starts(self, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """[S, 2] int64: index, in the whole sequence, of the first token of each of this rank's two chunks."""
        length = cu_seqlens.diff().long() // 2
        return torch.stack([chunk * length for chunk in self.held], 1)

    @staticmethod
    def in_order(gathered: torch.Tensor) -> torch.Tensor:
        """[size, 2, ...], values for the two chunks of every rank -> [2 size, ...], in the order of the sequence."""
        return torch.cat([gathered[:, 0], gathered[:, 1].flip(0)])


@dataclass(frozen=True)
class TokenBatch:
    """T tokens of S sequences on one packed axis.

    Tokens with ``loss_mask`` False (prompt, tool output, padding) neither count nor influence the result; their values
    in the other tensors are ignored. Log-probs are natural logarithms of the sampled tokens' probabilities, in float32:
    float16 would change ratios by up to .8 %, bfloat16 by 6 %.
    """

    logprobs: torch.Tensor  # [T] float32, current policy, carries gradient
    rollout_logprobs: torch.Tensor  # [T] float32, behaviour policy, stored by the engine
    advantages: torch.Tensor  # [T] float32
    loss_mask: torch.Tensor  # [T] bool, True = trains
    cu_seqlens: torch.Tensor  # [S+1] int32, sequence s is tokens cu_seqlens[s] : cu_seqlens[s+1] (on this rank)
    old_logprobs: torch.Tensor | None = None  # [T] float32, proximal policy, computed by the actor
    ref_logprobs: torch.Tensor | None = None  # [T] float32, reference policy of the KL term
    entropy: torch.Tensor | None = None  # [T] float32 nats, of the current policy; carries gradient like logprobs
    sequence_index: torch.Tensor | None = None  # [S] int64, index in the optimizer batch, < 2^22; only breaks ties
    shard: ContextShard | None = None  # None: the batch has whole sequences
    with_prompts: bool = False  # whether each sequence begins with its prompt; otherwise it has response tokens alone

    def detach(self) -> TokenBatch:
        """The same batch without gradient, to compute statistics from."""
        entropy = None if self.entropy is None else self.entropy.detach()
        return replace(self, logprobs=self.logprobs.detach(), entropy=entropy)

    def floored(self) -> TokenBatch:
        """The same batch with LOWEST_LOGPROB for log-probs of -inf, which get no gradient; NaN stays NaN."""

        def floor(x: torch.Tensor) -> torch.Tensor:
            return x.nan_to_num(nan=math.nan, posinf=math.inf, neginf=LOWEST_LOGPROB)

        old = None if self.old_logprobs is None else floor(self.old_logprobs)
        return replace(
            self, logprobs=floor(self.logprobs), rollout_logprobs=floor(self.rollout_logprobs), old_logprobs=old
        )

    @staticmethod
    def concatenate(batches: list[TokenBatch]) -> TokenBatch:
        """One batch from the micro-batches of a rank, which must have the same shard and the same optional fields."""
        merged = {}
        for f in fields(TokenBatch):
            parts = [getattr(b, f.name) for b in batches]
            if f.name in ("shard", "with_prompts") or parts[0] is None:
                merged[f.name] = parts[0]
            elif f.name == "cu_seqlens":
                merged[f.name] = torch.cat([parts[0][:1], *(p.diff() for p in parts)]).cumsum(0, dtype=parts[0].dtype)
            else:
                merged[f.name] = torch.cat(parts)
        return TokenBatch(**merged)

    @property
    def segments(self) -> torch.Tensor:
        """Boundaries of the runs of consecutive tokens: the sequences [S + 1], or this rank's chunks [2 S + 1]."""
        return self.cu_seqlens if self.shard is None else self.shard.chunk_boundaries(self.cu_seqlens)

    @property
    def sequence_ids(self) -> torch.Tensor:
        """[T] int64, the sequence of each token."""
        return segment_ids(self.cu_seqlens, self.loss_mask.numel())

    @property
    def positions(self) -> torch.Tensor:
        """[T] int64, the index of each token in its whole sequence."""
        boundaries, tokens = self.segments, self.loss_mask.numel()
        ids = segment_ids(boundaries, tokens)
        index = torch.arange(tokens, device=ids.device) - boundaries.long()[ids]
        return index if self.shard is None else index + self.shard.chunk_starts(self.cu_seqlens).flatten()[ids]

    def check(self) -> None:
        """Raise `UserError` for a wrong shape or dtype. Reads no values, so the host does not wait for the device."""
        length = self.logprobs.numel()
        for name in (*_FLOATS, "loss_mask"):
            tensor = getattr(self, name)
            if tensor is None and name in _FLOATS[3:]:
                continue
            wanted = (torch.bool,) if name == "loss_mask" else (torch.float32, torch.float64)
            if tensor is None or tensor.shape != (length,) or tensor.dtype not in wanted:
                found = "None" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
                expected = f"{wanted[0]} [{length}], one packed axis with the tokens of logprobs"
                raise UserError(f"TokenBatch.{name} is {found}; expected {expected}")
        cu_seqlens, index = self.cu_seqlens, self.sequence_index
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
            found = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
            raise UserError(f"TokenBatch.cu_seqlens is {found}; expected int32 [S+1]")
        sequences = cu_seqlens.numel() - 1
        if index is not None and index.shape != (sequences,):
            raise UserError(f"TokenBatch.sequence_index has shape {tuple(index.shape)}; expected [{sequences}]")

    def by_sequence(self, values: torch.Tensor) -> dict[int, dict[int, Any]]:
        """{``sequence_index`` of each sequence: {position: value}} of its trained tokens, for values [T].

        Waits for the device.
        """
        assert self.sequence_index is not None
        found: dict[int, dict[int, Any]] = {sequence: {} for sequence in self.sequence_index.tolist()}
        rows = torch.stack([self.sequence_index[self.sequence_ids], self.positions])[:, self.loss_mask].tolist()
        for sequence, position, value in zip(*rows, values[self.loss_mask].tolist(), strict=True):
            found[sequence][position] = value
        return found


def segment_ids(boundaries: torch.Tensor, tokens: int) -> torch.Tensor:
    """Boundaries [segments + 1] -> [tokens] int64, the segment of each token. Does not wait for the device."""
    lengths = boundaries.diff().long()
    index = torch.arange(lengths.numel(), device=boundaries.device)
    return torch.repeat_interleave(index, lengths, output_size=tokens)
