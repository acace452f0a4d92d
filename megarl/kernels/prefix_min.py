"""Exclusive running minimum over the trained tokens of packed sequences: the prefix-min of MinPRO, in log space."""

from __future__ import annotations

import torch

from megarl.errors import UserError
from megarl.kernels import library

BACKENDS = ("torch", "cpp")
_NONE = 0x7FFFFFFF  # key above that of +infinity: no trained token so far
_NAN = -1  # bit pattern of a NaN whose key is the lowest


def prefix_min(
    log_ratio: torch.Tensor,  # [T] float32
    mask: torch.Tensor,  # [T] bool, True = trained
    cu_seqlens: torch.Tensor,  # [S+1] int32, from 0 to T
    backend: str = "torch",
) -> torch.Tensor:
    """[T] float32 without gradient: min of log_ratio over the earlier trained tokens of the sequence, 0 for none.

    0 is log 1, the minimum of no ratios. Tokens with mask False influence nothing, whatever their value; a trained NaN
    makes every later token of its sequence NaN. The backends agree exactly and do not wait for the device, so
    on a GPU nothing checks that cu_seqlens is right.

    backend: ``torch``, or ``cpp``, the compiled kernels (CPU and CUDA); `UserError` if they are not installed.
    """
    if backend not in BACKENDS:
        raise UserError(f"kernel backend is {backend!r}; expected one of {', '.join(BACKENDS)}")
    _check_inputs(log_ratio, mask, cu_seqlens)
    if backend == "torch":
        return _prefix_min_torch(log_ratio.detach(), mask, cu_seqlens)
    result: torch.Tensor = _prefix_min_cpp(log_ratio.detach(), mask, cu_seqlens)
    return result


def _check_inputs(log_ratio: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    expected = {"log_ratio": torch.float32, "mask": torch.bool, "cu_seqlens": torch.int32}
    for (name, dtype), tensor in zip(expected.items(), (log_ratio, mask, cu_seqlens), strict=True):
        if tensor.dtype is not dtype or tensor.dim() != 1 or tensor.device != log_ratio.device:
            found = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
            raise ValueError(f"prefix_min: {name} is {found}; expected {dtype}, one axis, on {log_ratio.device}")
    if mask.shape != log_ratio.shape or not cu_seqlens.numel():
        shapes = f"log_ratio {tuple(log_ratio.shape)}, mask {tuple(mask.shape)}, cu_seqlens {tuple(cu_seqlens.shape)}"
        raise ValueError(f"prefix_min: {shapes}; expected [T], [T], [S+1]")


def _prefix_min_torch(log_ratio: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """One cummin over integer keys that sort like the floats, minus sequence * 2^32: it starts afresh in each."""
    lengths = cu_seqlens.diff().long()
    index = torch.arange(lengths.numel(), device=mask.device)
    offset = torch.repeat_interleave(index, lengths, output_size=mask.numel()) << 32
    bits = torch.where(log_ratio.isnan(), _NAN, log_ratio.contiguous().view(torch.int32))
    keys = torch.where(mask, torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits), _NONE)
    inclusive = (keys - offset).cummin(0).values
    # On the first token of a sequence the sum is beyond 2^31: it comes from an earlier one, and becomes _NONE.
    exclusive = torch.cat([inclusive.new_full((1,), _NONE), inclusive])[:-1] + offset
    least = exclusive.clamp(max=_NONE).int()
    values = torch.where(least < 0, least ^ 0x7FFFFFFF, least).view(torch.float32)
    return torch.where(least == _NONE, 0.0, values)


@torch.library.custom_op("megarl::prefix_min", mutates_args=(), device_types=("cpu", "cuda"))
def _prefix_min_cpp(log_ratio: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    log_ratio, mask, cu_seqlens = log_ratio.contiguous(), mask.contiguous(), cu_seqlens.contiguous()
    out = torch.empty_like(log_ratio)
    if log_ratio.device.type == "cpu" and int(cu_seqlens[-1]) != log_ratio.numel():
        raise ValueError(
            f"prefix_min: cu_seqlens ends at {int(cu_seqlens[-1])}, but there are {log_ratio.numel()} tokens"
        )
    library.call("prefix_min", log_ratio.device, log_ratio, mask, cu_seqlens, cu_seqlens.numel() - 1, out)
    return out


@_prefix_min_cpp.register_fake
def _(log_ratio: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(log_ratio)
