"""The detailed diagnostics compared with loops over single tokens."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megarl.objectives import build_objective
from megarl.objectives.parts.detail import COLUMNS, DISTANCES, ROWS, detailed
from megarl.objectives.parts.summary import summarise
from tests.objectives import papers
from tests.objectives.random_batches import random_batch


def column(rho: float) -> int:
    """The histogram column of a ratio, found by comparing |rho - 1| with one power of two after the other."""
    distance, k = abs(rho - 1), 0
    while k < DISTANCES - 1 and distance >= 2.0 ** (k - 10):
        k += 1
    return DISTANCES - 1 - k if rho < 1 else DISTANCES + k


@pytest.mark.parametrize("kind", ["continuous", "heavy_tails", "empty_masks"])
def test_diagnostics_agree_with_their_definitions(kind: str) -> None:
    objective = build_objective("grpo", {})
    for seed in range(6):
        batch = random_batch(seed, kind)
        g = torch.Generator().manual_seed(seed)
        batch = replace(batch, entropy=5 * torch.rand(batch.logprobs.numel(), generator=g))
        kept = objective(batch).kept
        metrics, histograms = detailed(batch, kept)
        rs = papers.responses(batch, batch.logprobs.detach().double())
        by_entropy, by_probability = torch.zeros(2, ROWS, COLUMNS, dtype=torch.int64)
        inverse, pairs, occupancy = [], [], []
        for o in rs:
            for i, t in enumerate(o):
                gamma = math.exp(min(max(sum(s.l_value for s in o[:i]), -80), 80))
                inverse.append(1 / gamma - 1)
                occupancy.append(math.log(gamma))
                probability = math.exp(t.logprob.item())
                by_entropy[min(int(4 * float(batch.entropy[t.index])), ROWS - 1), column(t.rho_value)] += 1
                by_probability[min(int(-math.log2(probability)), ROWS - 1), column(t.rho_value)] += 1
                pairs.append((t.logprob.item(), t.a * float(kept[t.index])))
        assert float(metrics["prefix/reverse_chi2"][0]) == pytest.approx(sum(inverse), rel=1e-5, abs=1e-6)
        assert float(metrics["prefix/reverse_chi2"][1]) == len(inverse)
        assert torch.equal(histograms["entropy_by_ratio"], by_entropy), seed
        assert torch.equal(histograms["probability_by_ratio"], by_probability), seed
        if not pairs:
            continue
        out = summarise(metrics, histograms)
        means = [sum(column) / len(pairs) for column in zip(*pairs, strict=True)]
        covariance = sum(x * y for x, y in pairs) / len(pairs) - means[0] * means[1]
        assert out["entropy_covariance"] == pytest.approx(covariance, rel=1e-5, abs=1e-6)
        assert not any(name.startswith("covariance/") for name in out)
        lowest = min(max(min(occupancy), -20), 20)
        assert math.log(out["prefix_occupancy/q00"]) == pytest.approx(lowest, rel=1 / 16, abs=2.0**-13)
        assert out["entropy_by_ratio"]["counts"] == histograms["entropy_by_ratio"].tolist()
