"""How far the policy has moved from the data it trains on: quantities that add over ranks, and what they mean.

Objectives return sums (`Terms.metrics`); quantiles need the distribution, which `log_ratio_histograms` counts in fixed
bins. Add both over micro-batches and ranks, then `summarise` them.
"""

from __future__ import annotations

import math

import torch

from megarl.batch import TokenBatch
from megarl.objectives.prefix import dampen_metrics
from megarl.objectives.ratios import LOG_RATIO_LIMIT, log_ratio, prefix_min_log_ratio
from megarl.objectives.terms import Metric

SMALLEST = 1e-4  # nats; log-ratios below share the bin of 0
BINS_PER_SIGN = 256  # logarithmic from SMALLEST to LOG_RATIO_LIMIT: neighbours differ by 4.9 %
BINS = 2 * BINS_PER_SIGN + 1
QUANTILES = (0.0, 0.01, 0.05, 0.5, 0.95, 0.99, 1.0)
_STEP = math.log(LOG_RATIO_LIMIT / SMALLEST) / BINS_PER_SIGN


def log_ratio_histograms(batch: TokenBatch) -> dict[str, torch.Tensor]:
    """Counts [BINS] int64 of the trained tokens' log-ratio (``ratio``) and log m_t (``prefix_min``)."""
    l, _ = log_ratio(batch.logprobs.detach(), batch.rollout_logprobs, batch.loss_mask)
    prefix = prefix_min_log_ratio(l, batch)
    return {"ratio": histogram(l, batch.loss_mask), "prefix_min": histogram(prefix, batch.loss_mask)}


def prefix_metrics(batch: TokenBatch) -> dict[str, Metric]:
    """Dampen rates after good and bad prefixes for rho_t (``dampen/token``) and for m_t rho_t (``dampen/prefix``):
    what Prefix-Ratio GRPO's Table 2 compares, whichever objective trains."""
    l, _ = log_ratio(batch.logprobs.detach(), batch.rollout_logprobs, batch.loss_mask)
    prefix = prefix_min_log_ratio(l, batch)
    token = dampen_metrics(l.exp(), prefix, batch, "dampen/token")
    return token | dampen_metrics((prefix + l).exp(), prefix, batch, "dampen/prefix")


def histogram(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """[T] log-ratios, [T] bool -> counts [BINS] int64; bin 256 holds 0, higher bins larger values."""
    magnitude = values.detach().double().abs().clamp(SMALLEST, LOG_RATIO_LIMIT)
    step = ((magnitude / SMALLEST).log() / _STEP).ceil().clamp(max=BINS_PER_SIGN).long()
    index = BINS_PER_SIGN + step * values.sign().long()
    index = torch.where(where, index, BINS)
    return torch.zeros(BINS + 1, dtype=torch.int64, device=values.device).index_add_(0, index, torch.ones_like(index))[
        :-1
    ]


def quantiles(counts: torch.Tensor, levels: tuple[float, ...] = QUANTILES) -> list[float]:
    """Log-ratio quantiles (smallest value with at least that share at or below it), to half a bin: 2.5 % of the
    log-ratio, or 1e-4 nats. NaN for an empty histogram."""
    cumulative = counts.double().cumsum(0)
    total = float(cumulative[-1])
    if total == 0:
        return [math.nan] * len(levels)
    wanted = torch.tensor([max(q * total, 1.0) for q in levels], dtype=torch.float64, device=counts.device)
    index = torch.searchsorted(cumulative, wanted - 1e-9 * total).clamp(max=BINS - 1)
    return [_centre(i) for i in index.tolist()]


def summarise(metrics: dict[str, Metric], histograms: dict[str, torch.Tensor] | None = None) -> dict[str, float]:
    """Numbers of one update from summed metrics and histograms; waits for the device.

    Every metric becomes sum / count (left out if the count is 0). Added: ``ess`` (effective sample size as a share of
    the tokens: mean(rho)^2 / mean(rho^2)), ``selectivity`` (dampen rate after bad prefixes over that after good ones),
    ``ratio/q50`` ... ``prefix_min/q01`` (quantiles of the ratios), ``chi2/bound`` (Theorem 5.1 of M2PO: chi2 <= R^2 M2,
    R the largest ratio or inverse ratio).
    """
    rows = torch.stack([torch.stack(pair) for pair in metrics.values()]).tolist() if metrics else []
    out = {name: total / count for name, (total, count) in zip(metrics, rows, strict=True) if count}
    if out.get("ratio/square_mean"):
        out["ess"] = out["ratio/mean"] ** 2 / out["ratio/square_mean"]
    for name in [n for n in out if n.endswith("/good_prefix")]:
        bad = out.get(name.replace("/good_prefix", "/bad_prefix"))
        if bad is not None and out[name] > 0:
            out[name.replace("/good_prefix", "/selectivity")] = bad / out[name]
    for name, counts in (histograms or {}).items():
        for level, value in zip(QUANTILES, quantiles(counts), strict=True):
            if not math.isnan(value):
                out[f"{name}/q{round(100 * level):02d}"] = math.exp(value)
    if histograms and "ratio" in histograms and "m2/all" in out:
        low, high = _outer_edges(histograms["ratio"])
        out["chi2/bound"] = math.exp(2 * max(high, -low)) * out["m2/all"]
    return out


def _edge(step: int) -> float:
    return SMALLEST * math.exp(step * _STEP)


def _centre(index: int) -> float:
    step = index - BINS_PER_SIGN
    return math.copysign(math.sqrt(_edge(abs(step)) * _edge(abs(step) - 1)), step) if step else 0.0


def _outer_edges(counts: torch.Tensor) -> tuple[float, float]:
    """Log-ratios between which every counted token lies."""
    used = counts.nonzero().flatten().tolist() or [BINS_PER_SIGN]
    low, high = used[0] - BINS_PER_SIGN, used[-1] - BINS_PER_SIGN
    return (-_edge(-low) if low < 0 else -SMALLEST), (_edge(high) if high > 0 else SMALLEST)
