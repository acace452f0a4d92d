"""The packed tokens that the token-wise kernels read, checked once, and the backends they have."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from megarl.errors import UserError
from megarl.kernels import library

LOG_RATIO_LIMIT = 20.0  # nats; exp(20) = 4.9e8 still squares within float32
BACKENDS = ("torch", "cpp", "cuda", "triton")
STATISTICS_IN_TORCH = ("torch", "triton")  # backends without kernels of the batch statistics and segment summaries


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
        for name, dtype in _DTYPES.items():
            tensor = getattr(self, name)
            if tensor is None:
                continue
            wrong = tensor.dtype is not dtype or tensor.dim() != 1 or tensor.device != device
            if wrong or (name != "cu_seqlens" and tensor.shape != length) or not tensor.is_contiguous():
                found = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
                raise ValueError(f"{name} is {found}; expected contiguous {dtype} {tuple(length)} on {device}")

    @property
    def segments(self) -> int:
        return self.cu_seqlens.numel() - 1

    def pointers(self) -> library.TokenPointers:
        tensors = (self.logprobs, self.rollout_logprobs, self.old_logprobs, self.advantages, self.mask, self.cu_seqlens)
        return library.TokenPointers(*(None if t is None else t.data_ptr() for t in tensors), self.segments)


_DTYPES = {
    "logprobs": torch.float32,
    "rollout_logprobs": torch.float32,
    "advantages": torch.float32,
    "mask": torch.bool,
    "cu_seqlens": torch.int32,
    "old_logprobs": torch.float32,
}


def check_backend(backend: str, device: torch.device) -> None:
    """`UserError` where `backend` is unknown, not installed, or does not run on `device`."""
    if backend not in BACKENDS:
        raise UserError(f"kernel backend is {backend!r}; expected one of {', '.join(BACKENDS)}")
    if backend == "triton":
        _check_triton(device)
    needed = {"cpp": "cpu", "cuda": "cuda"}.get(backend)
    if needed is None:
        return
    if device.type != needed:
        raise UserError(f"kernel backend {backend!r} runs on {needed}, but the tensors are on {device.type}")
    library.load_library(needed)


def _check_triton(device: torch.device) -> None:
    if importlib.util.find_spec("triton") is None:
        raise UserError("kernel backend 'triton' needs the package triton, which is not installed; pip install triton")
    from triton import knobs

    if device.type != "cuda" and not knobs.runtime.interpret:
        raise UserError(f"kernel backend 'triton' runs on cuda, but the tensors are on {device.type}")
