"""`Tokens`, the checked input of the token-wise kernels, and the check of these kernels' backends."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from megarl.batch import TokenBatch, segment_ids
from megarl.errors import UserError
from megarl.kernels import library
from megarl.kernels.constants import LOG_RATIO_LIMIT, POSITION_BITS

BACKENDS = ("torch", "cpp", "cuda", "triton")
STATISTICS_IN_TORCH = ("torch", "triton")  # these compute batch statistics in torch


@dataclass(frozen=True)
class Tokens:
    """T tokens in contiguous segments: whole sequences, or the chunks that a context-parallel rank holds of them."""

    logprobs: torch.Tensor  # [T] float32
    rollout_logprobs: torch.Tensor  # [T] float32
    advantages: torch.Tensor  # [T] float32
    mask: torch.Tensor  # [T] bool, True = trains
    cu_seqlens: torch.Tensor  # [segments + 1] int32
    old_logprobs: torch.Tensor | None = None  # [T] float32

    def __post_init__(self) -> None:
        device, length = self.logprobs.device, self.logprobs.shape
        for name, tensor in vars(self).items():
            if tensor is None:
                continue
            dtype = {"mask": torch.bool, "cu_seqlens": torch.int32}.get(name, torch.float32)
            wrong = tensor.dtype is not dtype or tensor.dim() != 1 or tensor.device != device
            if wrong or (name != "cu_seqlens" and tensor.shape != length) or not tensor.is_contiguous():
                found = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
                raise ValueError(f"{name} is {found}; expected contiguous {dtype} {tuple(length)} on {device}")

    @classmethod
    def of(cls, batch: TokenBatch) -> Tokens:
        """A batch in the dtypes of the kernels. With context parallelism a sequence's two chunks are two segments."""
        old = batch.old_logprobs
        return cls(
            batch.logprobs.float().contiguous(),
            batch.rollout_logprobs.detach().float().contiguous(),
            batch.advantages.detach().float().contiguous(),
            batch.loss_mask.contiguous(),
            batch.segments.int().contiguous(),
            None if old is None else old.detach().float().contiguous(),
        )

    @property
    def segments(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def segment_ids(self) -> torch.Tensor:
        """[T] int64, the segment of each token."""
        return segment_ids(self.cu_seqlens, self.mask.numel())

    @property
    def log_ratio(self) -> torch.Tensor:
        """[T] logprobs - rollout_logprobs, clamped, without gradient, 0 where not trained."""
        difference = torch.where(self.mask, self.logprobs.detach() - self.rollout_logprobs, 0)
        return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def pointers(self) -> library.TokenPointers:
        tensors = (self.logprobs, self.rollout_logprobs, self.old_logprobs, self.advantages, self.mask, self.cu_seqlens)
        return library.TokenPointers(*(None if t is None else t.data_ptr() for t in tensors), self.segments)


def tie_places(batch: TokenBatch) -> torch.Tensor:
    """[segments] int64: place of each segment's first token in the (sequence, position) order that breaks M2PO's ties.

    Sequences are ordered by ``sequence_index``, the same on all ranks; without it, by their order in the batch.
    """
    sequences = batch.cu_seqlens.numel() - 1
    index = batch.sequence_index
    if index is None:
        index = torch.arange(sequences, device=batch.cu_seqlens.device)
    places = index.long() << POSITION_BITS
    if batch.shard is None:
        return places
    return (places[:, None] + batch.shard.chunk_starts(batch.cu_seqlens)).flatten()


def check_backend(backend: str, device: torch.device) -> None:
    """`UserError` if `backend` is unknown or does not run on `device`, or Triton is not installed. Whether the compiled
    kernels are, `megarl.kernels.library.call` checks."""
    if backend not in BACKENDS:
        raise UserError(f"kernel backend is {backend!r}; expected one of {', '.join(BACKENDS)}")
    needed = {"cpp": "cpu", "cuda": "cuda"}.get(backend, device.type)
    if device.type != needed:
        raise UserError(f"kernel backend {backend!r} runs on {needed}, but the tensors are on {device.type}")
    if backend != "triton":
        return
    if importlib.util.find_spec("triton") is None:
        raise UserError("kernel backend 'triton' needs the package triton, which is not installed; pip install triton")
    from triton import knobs

    if device.type != "cuda" and not knobs.runtime.interpret:
        raise UserError(f"kernel backend 'triton' needs a GPU, but the tensors are on {device}; use 'torch' there")
