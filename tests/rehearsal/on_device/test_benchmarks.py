"""The benchmark of the lm head credits a head with the operations that it makes."""

from __future__ import annotations

import math

import pytest
from torch.utils.flop_counter import FlopCounterMode

from tests.kernels.benchmark import load_benchmark


@pytest.mark.parametrize("head", ["megarl torch", "materialised"])
def test_a_head_is_credited_with_the_products_that_it_makes(head, monkeypatch):
    """At one operation per second, forward alone and forward with backward must take as long as the roofline says."""
    benchmark = load_benchmark("linear_logprob")

    def milliseconds(run):
        with FlopCounterMode(display=False) as products:
            run()
        return 1e3 * products.get_total_flops()

    monkeypatch.setattr(benchmark, "gpu_milliseconds", milliseconds)
    monkeypatch.setattr(benchmark, "launches_and_syncs", lambda run: (0, 0))
    shape = {"tokens": 24, "width": 16, "vocabulary": 40}
    row = benchmark.gpu_row(head, shape, flops=1.0, bytes_per_second=math.inf)
    assert (row["forward_of_roof"], row["both_of_roof"]) == (1, 1)
