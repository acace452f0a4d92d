"""Benchmarks measure no backend that fails or is wrong, name it, and measure the others."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.benchmark import load_benchmark


@pytest.mark.parametrize("benchmark", ["token_pass", "selection"])
def test_a_backend_that_fails_or_is_wrong_is_named_and_the_others_are_measured(
    benchmark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no GPU for "cuda"; "torch" is wrong in a token pass that is 1 permille off."""
    module = load_benchmark(benchmark)
    row = module.measure("m2po", 512, torch.device("cpu"), ["cpp", "cuda"], 1, False)
    assert row["cuda ms"] == "failed" and row["failed"].startswith("cuda: "), row
    assert row["cpp ms"] > 0 and row["torch ms"] > 0
    assert any(name.endswith("/cpp") for name in row) and not any(name.endswith("/cuda") for name in row)
    if benchmark == "token_pass":
        right = module.everything
        wrong = lambda *way: lambda batch: right(*way)(batch) * (1.001 if way[1] == "cpp" else 1)  # noqa: E731
        monkeypatch.setattr(module, "everything", wrong)
        row = module.measure("m2po", 512, torch.device("cpu"), ["cpp"], 1, False)
        assert row["cpp ms"] == "failed" and "cpp: AssertionError" in row["failed"]
