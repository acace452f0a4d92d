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


floats = st.floats(width=32, allow_nan=True) | st.sampled_from([0.0, -0.0, 1e-45, -1e-45, math.inf, -math.inf])
sequences = st.lists(st.lists(st.tuples(floats, st.booleans()), max_size=9), max_size=7)


@settings(max_examples=100)
@given(packed=sequences)
def test_any_packed_batch_agrees_with_the_loop(packed: list[list[tuple[float, bool]]]) -> None:
    values = torch.tensor([value for sequence in packed for value, _ in sequence], dtype=torch.float32)
    mask = torch.tensor([trained for sequence in packed for _, trained in sequence], dtype=torch.bool)
    inputs = values, mask, torch.tensor([0, *map(len, packed)]).cumsum(0).int()
    torch.testing.assert_close(exclusive_min(*inputs), minimum_by_loop(*inputs), rtol=0, atol=0, equal_nan=True)
