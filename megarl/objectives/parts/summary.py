"""Turns sums and histograms of objectives into the metrics of an update, such as how far the policy is off-policy.

Objectives return sums (`Terms.metrics`) and histograms (`Terms.histograms`). Add both over micro-batches and ranks,
then `summarise` them.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from megarl.objectives.parts.histograms import QUANTILES, outer_edges, quantiles
from megarl.objectives.parts.metrics import Metric


def summarise(metrics: dict[str, Metric], histograms: dict[str, torch.Tensor] | None = None) -> dict[str, Any]:
    """The metrics of one update from summed metrics and histograms; waits for the device.

    Every metric becomes sum / count (left out if the count is 0). Added: ``ess`` (effective sample size as a share of
    the tokens: mean(rho)^2 / mean(rho^2)) and ``ess/responses`` (the same for whole responses), ``positive_share/loss``
    (share of tokens with A > 0 in the sum of the losses' magnitudes: BAPO, Fig. 4), ``selectivity`` (dampen rate after
    bad prefixes divided by that after good ones), ``entropy_covariance`` (BAPO, Eq. 6), ``ratio/q50`` ...
    ``prefix_min/q01`` (quantiles of the ratios), ``chi2/bound`` (Theorem 5.1 of M2PO: chi2 <= R^2 M2, R the largest
    ratio or inverse ratio). Two-dimensional histograms are returned as counts.
    """
    rows = torch.stack([torch.stack(pair) for pair in metrics.values()]).tolist() if metrics else []
    out = {name: total / count for name, (total, count) in zip(metrics, rows, strict=True) if count}
    for ratio, ess in (("ratio", "ess"), ("response_ratio", "ess/responses")):
        if out.get(f"{ratio}/square_mean"):
            out[ess] = out[f"{ratio}/mean"] ** 2 / out[f"{ratio}/square_mean"]
    if "token_loss/positive" in out:
        good = abs(out["token_loss/positive"])
        bad = abs(out["token_loss"] - out["token_loss/positive"])
        if good + bad:
            out["positive_share/loss"] = good / (good + bad)
    for name in [n for n in out if n.endswith("/good_prefix")]:
        bad = out.get(name.replace("/good_prefix", "/bad_prefix"))
        if bad is not None and out[name] > 0:
            out[name.replace("/good_prefix", "/selectivity")] = bad / out[name]
    if "covariance/product" in out:
        product = out.pop("covariance/product")
        out["entropy_covariance"] = product - out.pop("covariance/logprob") * out.pop("covariance/advantage")
    for name, counts in (histograms or {}).items():
        if counts.dim() == 2:
            out[name] = {"counts": counts.tolist()}
            continue
        for level, value in zip(QUANTILES, quantiles(counts), strict=True):
            if not math.isnan(value):
                out[f"{name}/q{round(100 * level):02d}"] = math.exp(value)
    if histograms and "ratio" in histograms and "m2/all" in out:
        low, high = outer_edges(histograms["ratio"])
        out["chi2/bound"] = math.exp(2 * max(high, -low)) * out["m2/all"]
    return out
