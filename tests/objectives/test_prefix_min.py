"""The exclusive running minimum of packed sequences compared with a plain loop."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.objectives.parts.prefix_min import exclusive_min

NAN, INF = math.nan, math.inf


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


def assert_equal(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_nan_spreads_to_later_tokens_and_infinity_is_a_value() -> None:
    values = [1.0, NAN, -INF, 2.0, NAN, INF, 0.0, INF]
    mask = [1, 1, 1, 1, 0, 1, 0, 1]  # the second NaN is masked
    assert_equal(exclusive_min(*tensors(values, mask, [4, 4])), torch.tensor([0.0, 1.0, NAN, NAN, 0.0, 0.0, INF, INF]))
    assert_equal(exclusive_min(*tensors([-NAN, 1.0, -INF], [1, 1, 1], [3])), torch.tensor([0.0, NAN, NAN]))


floats = st.floats(width=32, allow_nan=True) | st.sampled_from([0.0, -0.0, 1e-45, -1e-45, INF, -INF])
sequences = st.lists(st.lists(st.tuples(floats, st.booleans()), max_size=9), max_size=7)


@settings(max_examples=100)
@given(packed=sequences)
def test_any_packed_batch_agrees_with_the_loop(packed: list[list[tuple[float, bool]]]) -> None:
    tokens = [token for sequence in packed for token in sequence]
    inputs = tensors([v for v, _ in tokens], [m for _, m in tokens], [len(s) for s in packed])
    assert_equal(exclusive_min(*inputs), minimum_by_loop(*inputs))
