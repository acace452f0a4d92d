"""`Terms`, the result of an objective, and the metrics that all objectives have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from megarl.batch import TokenBatch
from megarl.errors import UserError
from megarl.objectives.parts.histograms import histogram
from megarl.objectives.parts.metrics import (
    Metric,
    dampen_metrics,
    fraction_metrics,
    loss_metric,
    mean_metric,
    sign_metrics,
)
from megarl.objectives.parts.prefix_min import prefix_min_log_ratio


@dataclass(frozen=True)
class Terms:
    """loss [T] float32, not reduced, exactly 0 where ``loss_mask`` is False; kept [T] bool, tokens whose policy
    gradient survives mask, veto and clip; metrics {name: (sum, count)} and histograms {name: counts [BINS] int64} of
    the log-ratio (``ratio``) and of log m_t (``prefix_min``), which add over ranks and micro-batches."""

    loss: torch.Tensor
    kept: torch.Tensor
    metrics: dict[str, Metric]
    histograms: dict[str, torch.Tensor]


def require(batch: TokenBatch, name: str, who: str) -> torch.Tensor:
    """The batch's optional field ``name``; `UserError` if it is None. who: what needs it, for the message."""
    tensor = getattr(batch, name)
    if tensor is None:
        raise UserError(f"{who} needs TokenBatch.{name}, but it is None")
    return tensor


def trust_region(log_ratio: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """[T] bool, trained tokens whose ratio has already moved in the direction of their advantage (A > 0, rho > 1 or
    A < 0, rho < 1), which are those that a clip can affect: M2PO's set T."""
    l, a = log_ratio.detach(), batch.advantages
    return batch.loss_mask & (((a > 0) & (l > 0)) | ((a < 0) & (l < 0)))


class Settings(Protocol):
    """The settings of an objective that `make_terms` reads."""

    @property
    def aggregation(self) -> str: ...

    @property
    def dampened_below(self) -> float: ...


def make_terms(
    settings: Settings,
    batch: TokenBatch,
    loss: torch.Tensor,  # [T], any value where loss_mask is False
    kept: torch.Tensor,  # [T] bool
    log_ratio: torch.Tensor,  # [T], clamped, 0 where loss_mask is False
    clamped: torch.Tensor,  # [T] bool, where the log-ratio was clamped
    metrics: dict[str, Metric],  # the objective's own
) -> Terms:
    """Mask the loss and add the metrics that every objective has.

    ``ratio/mean`` and ``ratio/square_mean`` give the effective sample size mean^2 / square_mean; ``kl/k1`` and
    ``kl/k3`` estimate KL(behaviour || current) from behaviour samples (http://joschu.net/blog/kl-approx.html);
    ``m2/before`` is the mean squared log-ratio of trust-region tokens, ``m2/after`` that of those that are kept;
    ``dampen/token`` and ``dampen/prefix`` are the dampen rates of rho_t and of m_t rho_t (Prefix-Ratio GRPO, Table 2).
    `sign_metrics` adds metrics by the sign of the advantage.
    """
    mask = batch.loss_mask
    loss, kept = torch.where(mask, loss, 0), kept & mask
    l = log_ratio.detach().double()
    ratio, square = l.exp(), l.square()
    trust = trust_region(log_ratio, batch)
    prefix = prefix_min_log_ratio(log_ratio, batch)
    common = {
        "loss": loss_metric(loss, batch, settings.aggregation),
        "ratio/mean": mean_metric(ratio, mask),
        "ratio/square_mean": mean_metric(ratio.square(), mask),
        "chi2": mean_metric((ratio - 1).square(), mask),
        "kl/k1": mean_metric(-l, mask),
        "kl/k3": mean_metric(ratio - 1 - l, mask),
        "m2/all": mean_metric(square, mask),
        "m2/before": mean_metric(square, trust),
        "m2/after": mean_metric(square, trust & kept),
        "log_ratio_clamp_fraction": mean_metric(clamped.double(), mask),
        **fraction_metrics("kept_fraction", kept, batch),
        **dampen_metrics(log_ratio.exp(), prefix, batch, "dampen/token", settings.dampened_below),
        **dampen_metrics((prefix + log_ratio).exp(), prefix, batch, "dampen/prefix", settings.dampened_below),
        **sign_metrics(ratio, loss.detach(), batch),
    }
    if batch.entropy is not None:
        common["entropy"] = mean_metric(batch.entropy, mask)
    histograms = {"ratio": histogram(log_ratio, mask), "prefix_min": histogram(prefix, mask)}
    return Terms(loss, kept, common | metrics, histograms)
