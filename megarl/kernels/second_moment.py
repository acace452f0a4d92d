"""Histograms for M2PO's radix selection: count and fixed-point sum of l^2 of the tokens in the trust region.

A token's key is the bit pattern of |l|, which sorts like |l|. The torch code is the definition; the compiled kernels
give the same integers.
"""

from __future__ import annotations

import ctypes

import torch

from megarl.kernels import library
from megarl.kernels.constants import LARGEST_SQUARE, LAST_PLACE, OUTSIDE, SQUARE_SCALE
from megarl.kernels.tokens import STATISTICS_IN_TORCH, Tokens, check_backend


def moment_keys(tokens: Tokens, backend: str = "cpp") -> torch.Tensor:
    """[T] int32: bit pattern of |l| for tokens of the trust region (A > 0, l > 0 or A < 0, l < 0), -1 elsewhere."""
    device = tokens.logprobs.device
    check_backend(backend, device)
    if backend in STATISTICS_IN_TORCH:
        l, a = tokens.log_ratio, tokens.advantages
        trust = tokens.mask & (((a > 0) & (l > 0)) | ((a < 0) & (l < 0)))
        return torch.where(trust, l.abs().view(torch.int32), OUTSIDE)
    keys = torch.empty(tokens.logprobs.shape, dtype=torch.int32, device=device)
    size = (keys.numel(),) if device.type == "cuda" else ()
    library.call("moment_keys", device, tokens.pointers(), *size, keys)
    return keys


def moment_histogram(
    keys: torch.Tensor,
    prefix: torch.Tensor,  # 0-d int64
    shift: int,
    bits: int,
    backend: str = "cpp",
) -> torch.Tensor:
    """[2, 2^bits] int64: count and sum of l^2 (units of 2^-30) of the tokens whose keys equal `prefix` in the bits from
    shift + bits on, binned by the next lower `bits` bits of their keys."""
    check_backend(backend, keys.device)
    if backend in STATISTICS_IN_TORCH:
        return _table(keys.long(), (keys >= 0), keys, prefix, shift, bits)
    return _compiled("moment_histogram", keys, keys.numel(), prefix, shift=shift, bits=bits)


def moment_ties(
    keys: torch.Tensor,
    key: torch.Tensor,  # 0-d int64: the bit pattern that several tokens share
    places: torch.Tensor,  # [segments] int64, see `megarl.kernels.tokens.tie_places`
    tokens: Tokens,
    prefix: torch.Tensor,
    shift: int,
    bits: int,
    backend: str = "cpp",
) -> torch.Tensor:
    """As `moment_histogram`, but for the tokens whose key is `key`, with their tie order in place of their key."""
    check_backend(backend, keys.device)
    if backend in STATISTICS_IN_TORCH:
        return _table(tie_order(tokens, places), keys == key, keys, prefix, shift, bits)
    boundaries = (tokens.cu_seqlens, tokens.segments)
    return _compiled("moment_ties", keys, key, places, *boundaries, prefix, shift=shift, bits=bits)


def _compiled(name: str, keys: torch.Tensor, *arguments: torch.Tensor | int, shift: int, bits: int) -> torch.Tensor:
    table = torch.zeros(2, 1 << bits, dtype=torch.int64, device=keys.device)
    library.call(name, keys.device, keys, *arguments, ctypes.c_int(shift), ctypes.c_int(bits), table)
    return table


def tie_order(tokens: Tokens, places: torch.Tensor) -> torch.Tensor:
    """[T] int64, the tie-break among equal |l|: later tokens in (sequence, position) order have lower values.

    Algorithm 1 of M2PO removes one arg max at a time, the first one among equals, which has the highest tie order.
    """
    ids = tokens.segment_ids
    index = torch.arange(ids.numel(), device=ids.device) - tokens.cu_seqlens.long()[ids]
    return LAST_PLACE - (places[ids] + index)


def fixed_point(l: torch.Tensor) -> torch.Tensor:
    """l^2 as int64 multiples of 2^-30."""
    return (l.double().square().clamp(max=LARGEST_SQUARE) * SQUARE_SCALE).round().long()


def _table(
    digits: torch.Tensor, candidates: torch.Tensor, keys: torch.Tensor, prefix: torch.Tensor, shift: int, bits: int
) -> torch.Tensor:
    candidates = candidates & (digits >> (shift + bits) == prefix >> (shift + bits))
    bins = 1 << bits
    where = torch.where(candidates, (digits >> shift) & (bins - 1), bins)
    squares = fixed_point(torch.where(candidates, keys, 0).view(torch.float32))
    table = digits.new_zeros(2, bins + 1)
    table[0].index_add_(0, where, torch.ones_like(where))
    table[1].index_add_(0, where, squares)
    return table[:, :bins].contiguous()
