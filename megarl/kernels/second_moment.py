"""Histograms of M2PO's radix selection: counts and fixed-point sums of l^2 over the tokens of the trust region.

Backends ``cpp`` and ``cuda``; the torch version is `megarl.objectives.parts.second_moment` itself.
"""

from __future__ import annotations

import ctypes

import torch

from megarl.kernels import library
from megarl.kernels.tokens import Tokens, check_backend


def moment_keys(tokens: Tokens, backend: str = "cpp") -> torch.Tensor:
    """[T] int32: bit pattern of |l| for tokens of the trust region, -1 elsewhere."""
    device = tokens.logprobs.device
    check_backend(backend, device)
    keys = torch.empty(tokens.logprobs.shape, dtype=torch.int32, device=device)
    if device.type == "cuda":
        library.call("moment_keys", device, tokens.pointers(), keys.numel(), keys)
    else:
        library.call("moment_keys", device, tokens.pointers(), keys)
    return keys


def moment_histogram(
    keys: torch.Tensor, prefix: torch.Tensor, shift: int, bits: int, backend: str = "cpp"
) -> torch.Tensor:
    """[2, 2^bits] int64: number and sum of l^2 (units of 2^-30) of the keys that agree with `prefix` (0-d int64) above
    shift + bits, by their bits from shift on."""
    check_backend(backend, keys.device)
    table = torch.zeros(2, 1 << bits, dtype=torch.int64, device=keys.device)
    where = (ctypes.c_int(shift), ctypes.c_int(bits))
    library.call("moment_histogram", keys.device, keys, keys.numel(), prefix, *where, table)
    return table


def moment_ties(
    keys: torch.Tensor,
    key: torch.Tensor,  # 0-d int64: the tied bit pattern
    places: torch.Tensor,  # [segments] int64, see `megarl.kernels.token_pass`
    cu_seqlens: torch.Tensor,
    prefix: torch.Tensor,
    shift: int,
    bits: int,
    backend: str = "cpp",
) -> torch.Tensor:
    """As `moment_histogram`, over the tie orders of the tokens whose key is `key`."""
    check_backend(backend, keys.device)
    table = torch.zeros(2, 1 << bits, dtype=torch.int64, device=keys.device)
    segments, where = cu_seqlens.numel() - 1, (ctypes.c_int(shift), ctypes.c_int(bits))
    library.call("moment_ties", keys.device, keys, key, places, cu_seqlens, segments, prefix, *where, table)
    return table
