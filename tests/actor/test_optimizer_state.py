"""Ranges of flattened tensors, expressed as rectangles of the tensors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.actor.optimizer_state import rectangles

pytestmark = pytest.mark.usefixtures("one_rank")


@given(data=st.data(), shape=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_rectangles_cover_a_range_once_and_in_order(data, shape):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    end = data.draw(st.integers(start, size))
    flat = torch.arange(size).view(shape)
    found = rectangles(start, end, tuple(shape))
    values = [flat[tuple(slice(o, o + n) for o, n in zip(*r, strict=True))].flatten() for r in found]
    assert torch.cat([torch.zeros(0, dtype=torch.int64), *values]).tolist() == list(range(start, end))
    assert len(found) <= 2 * len(shape) - 1
