"""BAPO's contributions, binned by ratio: exact integer sums.

Backends ``cpp`` and ``cuda``; the torch version is `megarl.objectives.parts.balance` itself.
"""

from __future__ import annotations

import ctypes

import torch

from megarl.kernels import library
from megarl.kernels.tokens import Tokens, check_backend


def binned_contributions(
    tokens: Tokens,
    low: torch.Tensor,  # [L] float64, ascending
    high: torch.Tensor,  # [H] float64, ascending
    weighted: bool,  # True: w = pi_rollout, False: w = 1
    backend: str = "cpp",
) -> torch.Tensor:
    """[6, H + L + 4] int64: three limbs (multiples of 1, 2^-24, 2^-48) of w |A|, three of w |A| ratio, over H + 1 bins
    of the tokens with A > 0, one unused, L + 1 bins of those with A < 0, one unused."""
    device = tokens.logprobs.device
    check_backend(backend, device)
    lows, highs = low.numel(), high.numel()
    table = torch.zeros(6, lows + highs + 4, dtype=torch.int64, device=device)
    size = (tokens.logprobs.numel(),) if device.type == "cuda" else ()
    grids = (low, ctypes.c_int(lows), high, ctypes.c_int(highs))
    library.call("contributions", device, tokens.pointers(), *size, ctypes.c_int(int(weighted)), *grids, table)
    return table
