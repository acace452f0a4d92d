"""What an objective is, what it returns, and the metrics that all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroup

from megarl.batch import TokenBatch
from megarl.errors import UserError
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
    ratio_form: ClassVar[bool] = True  # objective_t = ratio * A; False: weight * A * log pi

    aggregation: str = choice("token_mean", "sequence_mean")

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, batch: TokenBatch, statistics: Any = None) -> Terms:
        raise NotImplementedError

    def statistics(self, batch: TokenBatch, group: ProcessGroup | None = None) -> Any:
        """What the call needs to know about the whole optimizer batch: None unless `needs_statistics`.

        batch: all tokens of this rank (`TokenBatch.concatenate` of its micro-batches), detached. group: every rank that
        holds other tokens of the optimizer batch (data x context parallel). No host sync.
        """
        return None


def require(batch: TokenBatch, name: str, who: str) -> torch.Tensor:
    """The optional field of that name, or `UserError`."""
    tensor = getattr(batch, name)
    if tensor is None:
        raise UserError(f"{who} needs TokenBatch.{name}, which is None")
    return tensor


def mean_metric(values: torch.Tensor, where: torch.Tensor) -> Metric:
    """(sum of values [T] where True, number of True): the mean over tokens, in float64."""
    return torch.where(where, values.detach(), 0).sum(dtype=torch.float64), where.sum(dtype=torch.float64)


def fraction_metrics(name: str, where: torch.Tensor, batch: TokenBatch) -> dict[str, Metric]:
    """Share of trained tokens where [T] bool is True: of all, of those with A > 0 and of those with A < 0."""
    mask, values = batch.loss_mask, where.double()
    return {
        name: mean_metric(values, mask),
        f"{name}/positive": mean_metric(values, mask & (batch.advantages > 0)),
        f"{name}/negative": mean_metric(values, mask & (batch.advantages < 0)),
    }


def loss_metric(loss: torch.Tensor, batch: TokenBatch, aggregation: str) -> Metric:
    """(sum of weight * loss, denominator): sum / count over all ranks is the loss that is minimised."""
    weights = token_weights(batch.loss_mask, batch.cu_seqlens, aggregation, batch.shard)
    count = denominator(batch.loss_mask, batch.cu_seqlens, aggregation, batch.shard)
    return (loss.detach().double() * weights).sum(), count.double()


def trust_region(log_ratio: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """[T] bool, trained tokens that already moved along their advantage (A > 0, rho > 1 or A < 0, rho < 1), where a
    clip can bite: M2PO's set T."""
    l, a = log_ratio.detach(), batch.advantages
    return batch.loss_mask & (((a > 0) & (l > 0)) | ((a < 0) & (l < 0)))


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

    ``ratio/mean`` and ``ratio/square_mean`` give the effective sample size mean^2 / square_mean; ``kl/k1`` and
    ``kl/k3`` estimate KL(behaviour || current) from behaviour samples (http://joschu.net/blog/kl-approx.html);
    ``m2/before`` is the mean squared log-ratio of trust-region tokens, ``m2/after`` that of those that are kept.
    """
    mask = batch.loss_mask
    loss, kept = torch.where(mask, loss, 0), kept & mask
    l = log_ratio.detach().double()
    ratio, square = l.exp(), l.square()
    trust = trust_region(log_ratio, batch)
    common = {
        "loss": loss_metric(loss, batch, objective.aggregation),
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
    }
    if batch.entropy is not None:
        common["entropy"] = mean_metric(batch.entropy, mask)
    return Terms(loss, kept, common | metrics)
