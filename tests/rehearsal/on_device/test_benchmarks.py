"""The benchmark of the lm head credits a head with the operations that it makes."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.benchmark import load_benchmark


class Products(TorchDispatchMode):
    """Counts the floating-point operations of matrix products."""

    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        left = {torch.ops.aten.mm: 0, torch.ops.aten.addmm: 1}.get(func.overloadpacket)
        if left is not None:
            self.operations += 2 * args[left].numel() * result.shape[1]
        return result


@pytest.mark.parametrize("head", ["megarl torch", "materialised"])
def test_a_head_is_credited_with_the_products_that_it_makes(head, monkeypatch):
    """At one operation per second, forward alone and forward with backward must take as long as the roofline says."""
    benchmark = load_benchmark("linear_logprob")

    def milliseconds(run):
        with Products() as products:
            run()
        return 1e3 * products.operations

    monkeypatch.setattr(benchmark, "gpu_milliseconds", milliseconds)
    monkeypatch.setattr(benchmark, "launches_and_syncs", lambda run: (0, 0))
    shape = {"tokens": 24, "width": 16, "vocabulary": 40}
    row = benchmark.gpu_row(head, shape, flops=1.0, bytes_per_second=math.inf)
    assert (row["forward_of_roof"], row["both_of_roof"]) == (1, 1)
