"""BAPO's contributions, binned by ratio, as exact integer sums. `_in_torch` defines them; the kernels give the same."""

from __future__ import annotations

import ctypes

import torch

from megarl.kernels import library
from megarl.kernels.constants import LARGEST_CONTRIBUTION, LIMB_BITS
from megarl.kernels.tokens import STATISTICS_IN_TORCH, Tokens, check_backend


def binned_contributions(
    tokens: Tokens,
    low: torch.Tensor,  # [L] float64, ascending
    high: torch.Tensor,  # [H] float64, ascending
    weighted: bool,  # True: w = pi_rollout, False: w = 1
    backend: str = "cpp",
) -> torch.Tensor:
    """[6, H + L + 4] int64, sums over the tokens of each bin: three limbs (multiples of 1, 2^-24, 2^-48) of w |A|, and
    three of w |A| ratio.

    Columns: H + 1 bins of the tokens with A > 0, bin i holding high[i-1] < ratio <= high[i]; one unused; L + 1 bins of
    the tokens with A < 0, likewise by `low`; one unused.
    """
    device = tokens.logprobs.device
    check_backend(backend, device)
    if backend in STATISTICS_IN_TORCH:
        return _in_torch(tokens, low, high, weighted)
    lows, highs = low.numel(), high.numel()
    table = torch.zeros(6, lows + highs + 4, dtype=torch.int64, device=device)
    size = (tokens.logprobs.numel(),) if device.type == "cuda" else ()
    grids = (low, ctypes.c_int(lows), high, ctypes.c_int(highs))
    library.call("contributions", device, tokens.pointers(), *size, ctypes.c_int(int(weighted)), *grids, table)
    return table


def _in_torch(tokens: Tokens, low: torch.Tensor, high: torch.Tensor, weighted: bool) -> torch.Tensor:
    lows, highs, mask, advantages = low.numel(), high.numel(), tokens.mask, tokens.advantages
    r, mass = tokens.log_ratio.exp().double(), torch.where(mask, advantages, 0).double().abs()
    if weighted:
        mass = mass * torch.where(mask, tokens.rollout_logprobs, 0).double().exp()
    positive, negative = (advantages > 0) & mask, (advantages < 0) & mask
    bins_high = torch.where(positive, torch.bucketize(r, high), highs + 1)
    bins_low = torch.where(negative, torch.bucketize(r, low), lows + 1) + highs + 2
    where = torch.where(positive, bins_high, bins_low)
    limbs = torch.cat([_limbs(mass), _limbs(mass * r)])  # [6, T]
    return limbs.new_zeros(6, highs + lows + 4).index_add_(1, where, limbs)


def _limbs(values: torch.Tensor) -> torch.Tensor:
    """[T] float64 >= 0 -> [3, T] int64: limb i is a multiple of 2^(-24 i); the rounding error is at most 2^-49."""
    rest, limbs = torch.nan_to_num(values).clamp(max=LARGEST_CONTRIBUTION), []
    for _ in range(2):
        limbs.append(rest.floor())
        rest = (rest - limbs[-1]) * 2.0**LIMB_BITS
    return torch.stack([*limbs, rest.round()]).long()
