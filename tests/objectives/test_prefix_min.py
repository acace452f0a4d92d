"""The exclusive running minimum of packed sequences compared with a plain loop."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.objectives.parts.prefix_min import exclusive_min


def minimum_by_loop(log_ratio: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The definition: the minimum of the log-ratios of the sequence's earlier trained tokens, 0 if there are none."""
    out = torch.zeros_like(log_ratio)
    for start, end in pairwise(cu_seqlens.tolist()):
        for t in range(start, end):
            earlier = log_ratio[start:t][mask[start:t]]
            out[t] = earlier.min() if earlier.numel() else 0.0
    return out


def tensors(values: list[float], mask: list[int], lengths: list[int]) -> tuple[torch.Tensor, ...]:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return torch.tensor(values, dtype=torch.float32), torch.tensor(mask, dtype=torch.bool), cu_seqlens


floats = st.floats(width=32, allow_nan=True) | st.sampled_from([0.0, -0.0, 1e-45, -1e-45, math.inf, -math.inf])
sequences = st.lists(st.lists(st.tuples(floats, st.booleans()), max_size=9), max_size=7)


@settings(max_examples=100)
@given(packed=sequences)
def test_any_packed_batch_agrees_with_the_loop(packed: list[list[tuple[float, bool]]]) -> None:
    tokens = [token for sequence in packed for token in sequence]
    inputs = tensors([v for v, _ in tokens], [m for _, m in tokens], [len(s) for s in packed])
    torch.testing.assert_close(exclusive_min(*inputs), minimum_by_loop(*inputs), rtol=0, atol=0, equal_nan=True)
