"""The benchmark of the lm head credits a head with the operations that it makes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.kernels.benchmark import load_benchmark


@pytest.mark.parametrize("head", ["megarl torch", "materialised"])
def test_a_head_is_credited_with_the_products_that_it_makes(head):
    """Forward alone, and forward with backward."""
    benchmark, shape = load_benchmark("linear_logprob"), {"tokens": 24, "width": 16, "vocabulary": 40}
    inputs = benchmark.problem(**shape, device="cuda", dtype=torch.bfloat16)
    for backward, credited in zip((False, True), benchmark.operations(head, **shape), strict=True):
        with FlopCounterMode(display=False) as made, torch.set_grad_enabled(backward):
            output = benchmark.HEADS[head](*inputs)
            if backward:
                output.sum().backward()
        assert made.get_total_flops() == credited
