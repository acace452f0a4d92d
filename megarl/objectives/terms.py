"""What an objective is, what it returns, and the metrics that all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from megarl.batch import TokenBatch
from megarl.objectives.aggregation import denominator, token_weights
from megarl.objectives.fields import check_fields, choice

Metric = tuple[
    torch.Tensor, torch.Tensor
]  # (sum, count), float64 0-d: add both over ranks and micro-batches, then divide


@dataclass(frozen=True)
class Terms:
    """loss [T] float32, not reduced, exactly 0 where ``loss_mask`` is False; kept [T] bool, tokens whose policy
    gradient survives mask, veto and clip; metrics {name: (sum, count)} that add over ranks and micro-batches."""

    loss: torch.Tensor
    kept: torch.Tensor
    metrics: dict[str, Metric]


@dataclass(frozen=True)
class Objective:
    """Settings of a per-token objective. Calling it maps a `TokenBatch` to `Terms`; it never reduces.

    aggregation: how the caller turns ``terms.loss`` into one number over the whole optimizer batch, see
    `megarl.objectives.aggregation`.
    """

    needs_statistics: ClassVar[bool] = False  # True: has `statistics(batch, group)`, whose result goes into the call
    requires: ClassVar[tuple[str, ...]] = ()  # optional fields of TokenBatch that must be there

    aggregation: str = choice("token_mean", "sequence_mean")

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, batch: TokenBatch, statistics: Any = None) -> Terms:
        raise NotImplementedError


def mean_metric(values: torch.Tensor, where: torch.Tensor) -> Metric:
    """(sum of values [T] where True, number of True): the mean over tokens, in float64."""
    return torch.where(where, values.detach(), 0).sum(dtype=torch.float64), where.sum(dtype=torch.float64)


def make_terms(
    objective: Objective,
    batch: TokenBatch,
    loss: torch.Tensor,  # [T], any value where loss_mask is False
    kept: torch.Tensor,  # [T] bool
    log_ratio: torch.Tensor,  # [T], clamped, 0 where loss_mask is False
    clamped: torch.Tensor,  # [T] bool, where the clamp of the log-ratio bites
    metrics: dict[str, Metric],
) -> Terms:
    """Mask the loss and add the metrics every objective has.

    ``ratio/mean`` and ``ratio/square_mean`` give the effective sample size mean^2 / square_mean. ``kl/k1`` and
    ``kl/k3`` estimate KL(behaviour || current) from behaviour samples (http://joschu.net/blog/kl-approx.html).
    """
    mask = batch.loss_mask
    loss = torch.where(mask, loss, 0)
    kept = kept & mask
    weights = token_weights(batch.loss_mask, batch.cu_seqlens, objective.aggregation, batch.shard)
    count = denominator(mask, batch.cu_seqlens, objective.aggregation, batch.shard)
    l = log_ratio.detach().double()
    ratio = l.exp()
    common = {
        "loss": ((loss.detach().double() * weights).sum(), count.double()),
        "ratio/mean": mean_metric(ratio, mask),
        "ratio/square_mean": mean_metric(ratio.square(), mask),
        "kl/k1": mean_metric(-l, mask),
        "kl/k3": mean_metric(ratio - 1 - l, mask),
        "m2/all": mean_metric(l.square(), mask),
        "log_ratio_clamp_fraction": mean_metric(clamped.double(), mask),
        "kept_fraction": mean_metric(kept.double(), mask),
        "kept_fraction/positive": mean_metric(kept.double(), mask & (batch.advantages > 0)),
        "kept_fraction/negative": mean_metric(kept.double(), mask & (batch.advantages < 0)),
    }
    return Terms(loss, kept, common | metrics)
