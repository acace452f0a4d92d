"""Metrics compared with their definitions on the trained tokens, and quantiles compared with sorting."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megarl.batch import TokenBatch
from megarl.objectives import build_objective
from megarl.objectives.parts.histograms import QUANTILES, histogram, quantiles
from megarl.objectives.parts.metrics import response_metrics
from megarl.objectives.parts.summary import summarise
from tests.objectives import papers
from tests.objectives.random_batches import random_batch

BATCHES = [random_batch(seed, kind) for kind in ("continuous", "ties", "heavy_tails") for seed in range(9)]


def log_ratios(batch: TokenBatch) -> torch.Tensor:
    return (batch.logprobs.detach().double() - batch.rollout_logprobs.double()).clamp(-20, 20)


def mean(values: torch.Tensor, where: torch.Tensor) -> tuple[float, float]:
    return float(values[where].sum()), float(where.sum())


def test_metrics_agree_with_their_definitions() -> None:
    objective = build_objective("mu_grpo", {"veto_threshold": 0.5, "ratio_max": 1.3, "veto_scope": "trigger"})
    for batch in BATCHES:
        mask, a, l = batch.loss_mask, batch.advantages, log_ratios(batch)
        rho = l.exp()
        terms = objective(batch)
        trust = mask & (((a > 0) & (l > 0)) | ((a < 0) & (l < 0)))
        veto, clip = (a < 0) & (rho < 0.5), (a > 0) & (rho > 1.3)
        expected = {
            "ratio/mean": mean(rho, mask),
            "ratio/square_mean": mean(rho**2, mask),
            "chi2": mean((rho - 1) ** 2, mask),
            "kl/k1": mean(-l, mask),
            "kl/k3": mean(rho - 1 - l, mask),
            "m2/all": mean(l**2, mask),
            "log_ratio_clamp_fraction": mean((l.abs() == 20).double(), mask),
            "m2/before": mean(l**2, trust),
            "m2/after": mean(l**2, trust & terms.kept),
            "veto_fraction": mean(veto.double(), mask),
            "veto_fraction/negative": mean(veto.double(), mask & (a < 0)),
            "clip_fraction": mean(clip.double(), mask),
            "clip_fraction/positive": mean(clip.double(), mask & (a > 0)),
            "kept_fraction": mean(terms.kept.double(), mask),
            "kept_fraction/negative": mean(terms.kept.double(), mask & (a < 0)),
            "loss": (float(terms.loss.detach().double().sum()), float(mask.sum())),
            "ratio/mean/negative": mean(rho, mask & (a < 0)),
            "positive_share/tokens": mean((a > 0).double(), mask),
            "token_loss": mean(terms.loss.detach().double(), mask),
            "token_loss/positive": (float(terms.loss.detach().double()[mask & (a > 0)].sum()), float(mask.sum())),
        }
        sizes = terms.loss.detach().double().abs()
        share = float(sizes[mask & (a > 0)].sum() / sizes[mask].sum())
        assert summarise(terms.metrics)["positive_share/loss"] == pytest.approx(share, rel=1e-5)
        for name, pair in expected.items():
            got = terms.metrics[name]
            assert got[0].dtype == got[1].dtype == torch.float64 and got[0].dim() == 0
            assert (float(got[0]), float(got[1])) == pytest.approx(pair, rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize(
    ("name", "fields", "bound"),
    [
        *((name, {}, 0.8) for name in ("reinforce", "grpo", "prefix_ratio_grpo")),
        *((name, {"eps_low": 0.1}, 0.9) for name in ("grpo", "prefix_ratio_grpo")),
        *((name, {"dampen_threshold": 0.96}, 0.96) for name in ("grpo", "mu_grpo")),
    ],
)
def test_a_token_counts_as_dampened_below_the_bound(name: str, fields: dict, bound: float, backend: str) -> None:
    """After prefixes that are good, from .8 on, and bad: Table 2 of Prefix-Ratio GRPO, which has eps .2 and .1."""
    for batch in BATCHES:
        rs = papers.responses(batch, batch.logprobs.detach().double())
        tokens = [(papers.prefix_min(o, i), t.rho_value) for o in rs for i, t in enumerate(o)]
        metrics = build_objective(name, fields)(batch, backend=backend).metrics
        for kind, prefix in itertools.product(("token", "prefix"), ("good", "bad")):
            ratios = [m * rho if kind == "prefix" else rho for m, rho in tokens if (m >= 0.8) == (prefix == "good")]
            found = [float(x) for x in metrics[f"dampen/{kind}/{prefix}_prefix"]]
            assert found == [sum(ratio < bound for ratio in ratios), len(ratios)], (kind, prefix)
        out = summarise(metrics)
        good, bad = (out.get(f"dampen/prefix/{prefix}_prefix") for prefix in ("good", "bad"))
        selectivity = pytest.approx(bad / good) if good and bad is not None else None
        assert out.get("dampen/prefix/selectivity") == selectivity


@pytest.mark.parametrize("spread", [1e-5, 0.5, 30.0])
def test_quantiles_agree_with_sorting_to_half_a_bin(spread: float) -> None:
    g = torch.Generator().manual_seed(int(spread * 1e5))
    for n in (1, 2, 7, 1000):
        values = (torch.randn(n, generator=g, dtype=torch.float64) * spread).clamp(-20, 20)
        exact = values.sort().values
        got = quantiles(histogram(values, torch.ones(n, dtype=torch.bool)))
        for level, q in zip(QUANTILES, got, strict=True):
            rank = max(math.ceil(level * n - 1e-9), 1) - 1
            assert q == pytest.approx(float(exact[rank]), rel=1 / 32, abs=2.0**-14), (n, level)


def test_summary_is_that_of_all_micro_batches() -> None:
    """The effective sample size, quantiles and the bound of Theorem 5.1 come from sums over the micro-batches."""
    metrics: dict = {}
    histograms: dict = {}
    for batch in BATCHES:
        terms = build_objective("dapo", {})(batch)
        for name, pair in terms.metrics.items():
            total, count = metrics.get(name, (0, 0))
            metrics[name] = (total + pair[0], count + pair[1])
        for name, counts in terms.histograms.items():
            histograms[name] = histograms.get(name, 0) + counts
    out = summarise(metrics, histograms)
    l = torch.cat([log_ratios(b)[b.loss_mask] for b in BATCHES])
    rho = l.exp()
    assert out["ess"] == pytest.approx(float(rho.mean() ** 2 / (rho**2).mean()), rel=1e-5)
    assert out["ratio/mean"] == pytest.approx(float(rho.mean()), rel=1e-5)
    assert math.log(out["ratio/q50"]) == pytest.approx(float(l.median()), rel=0.05, abs=1e-3)
    assert math.log(out["ratio/q100"]) == pytest.approx(float(l.max()), rel=1 / 32)
    largest = float(l.abs().max())
    assert out["chi2"] <= math.exp(2 * largest) * out["m2/all"] <= out["chi2/bound"] * (1 + 1e-6)
    assert all(math.isfinite(x) for x in out.values())


def test_effective_sample_size_of_responses() -> None:
    """The weights of the responses are .75 and 2.25, so it is 1.5^2 / 2.8125; untrained responses do not count."""
    rho, mask = torch.tensor([1.5, 0.5, 1.5, 1.5, 9.0]), torch.tensor([True, True, True, True, False])
    batch = TokenBatch(rho.log(), torch.zeros(5), torch.ones(5), mask, torch.tensor([0, 2, 4, 5]))
    assert summarise(response_metrics(batch))["ess/responses"] == pytest.approx(0.8)


def test_summary_is_empty_without_trained_tokens() -> None:
    batch = random_batch(0, "empty_masks")
    assert int(batch.loss_mask.sum()) == 0
    terms = build_objective("grpo", {})(batch)
    assert summarise(terms.metrics, terms.histograms) == {}
