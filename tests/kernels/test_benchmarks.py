"""Benchmarks: backends that fail or are wrong and the operations that a method is credited with."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from tests.kernels.benchmark import load_benchmark

CPU = torch.device("cpu")


@pytest.fixture
def token_pass(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, with eager torch in place of torch.compile, which takes seconds."""
    benchmark = load_benchmark("token_pass")
    monkeypatch.setattr(benchmark, "compiled", lambda name, statistics: benchmark.everything(name, "torch", statistics))
    return benchmark


def test_a_backend_that_fails_is_named_and_the_others_are_measured(token_pass: ModuleType) -> None:
    for row in (
        token_pass.measure("grpo", 512, CPU, ["cpp", "cuda"], 1),
        load_benchmark("selection").measure("m2po", 512, CPU, ["cpp", "cuda"], 1, False),
    ):
        assert row["cuda ms"] == "failed" and row["failed"].startswith("cuda: "), row
        assert row["cpp ms"] > 0 and row["torch ms"] > 0
        assert any(name.endswith("/cpp") for name in row) and not any(name.endswith("/cuda") for name in row)


def test_a_backend_that_is_wrong_is_not_measured(token_pass: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    right = token_pass.everything

    def wrong(name: str, backend: str, statistics: object) -> object:
        run = right(name, "torch", statistics)
        return (lambda batch: 1.001 * run(batch)) if backend == "cpp" else run

    monkeypatch.setattr(token_pass, "everything", wrong)
    row = token_pass.measure("grpo", 512, CPU, ["cpp"], 1)
    assert row["cpp ms"] == "failed" and "cpp: AssertionError" in row["failed"]


def test_a_head_is_credited_with_its_own_products() -> None:
    """Four matrix products; three with materialised logits, because the forward pass keeps them."""
    operations = load_benchmark("linear_logprob").operations
    shape = {"tokens": 3, "width": 5, "vocabulary": 7}
    assert operations("materialised", **shape) == (210, 630)
    assert operations("megarl triton", **shape) == (210, 840)
