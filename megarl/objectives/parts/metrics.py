"""Metrics as pairs (sum, count), which are added over ranks and micro-batches."""

from __future__ import annotations

import math

import torch

from megarl.batch import TokenBatch
from megarl.kernels.constants import BAD_PREFIX, SEQUENCE_LOG_RATIO_LIMIT
from megarl.objectives.parts.aggregation import denominator, token_weights
from megarl.objectives.parts.ratios import log_ratio
from megarl.objectives.parts.sequences import sequence_sum

# (sum, count), float64 0-d: add both over ranks and micro-batches, then divide
Metric = tuple[torch.Tensor, torch.Tensor]


def mean_metric(values: torch.Tensor, where: torch.Tensor) -> Metric:
    """(sum of ``values`` [T] over the tokens where ``where`` [T] is True, number of these), in float64."""
    return torch.where(where, values.detach(), 0).sum(dtype=torch.float64), where.sum(dtype=torch.float64)


def mean_metrics(values: dict[str, torch.Tensor], where: torch.Tensor) -> dict[str, Metric]:
    """`mean_metric` of several tensors over the same tokens, with few kernel launches for all of them together."""
    stacked = torch.stack([value.detach().double() for value in values.values()])
    sums, count = torch.where(where, stacked, 0).sum(1), where.sum(dtype=torch.float64)
    return {name: (total, count) for name, total in zip(values, sums, strict=True)}


def fraction_metrics(name: str, where: torch.Tensor, batch: TokenBatch) -> dict[str, Metric]:
    """Share of trained tokens for which ``where`` [T] is True: among all, those with A > 0, and those with A < 0."""
    mask, values = batch.loss_mask, where.double()
    return {
        name: mean_metric(values, mask),
        f"{name}/positive": mean_metric(values, mask & (batch.advantages > 0)),
        f"{name}/negative": mean_metric(values, mask & (batch.advantages < 0)),
    }


def loss_metric(loss: torch.Tensor, batch: TokenBatch, aggregation: str) -> Metric:
    """(sum of weight * loss, denominator): the sums over all ranks, divided, are the loss that is minimised."""
    weights = token_weights(batch.loss_mask, batch.cu_seqlens, aggregation, batch.shard)
    count = denominator(batch.loss_mask, batch.cu_seqlens, aggregation, batch.shard)
    return (loss.detach().double() * weights).sum(), count.double()


def sign_metrics(ratio: torch.Tensor, loss: torch.Tensor, batch: TokenBatch) -> dict[str, Metric]:
    """Mean ratio by the sign of the advantage (mu-GRPO, Fig. 3), and the share of tokens with A > 0 (BAPO, Fig. 4).

    ``positive_share/tokens`` is their share of the tokens. ``token_loss`` is the mean unweighted loss, and
    ``token_loss/positive`` the part of it from tokens with A > 0. Losses of tokens with the same sign of A have the
    same sign, so `summarise` can compute the share of the magnitudes from these two.
    """
    above, below = batch.loss_mask & (batch.advantages > 0), batch.loss_mask & (batch.advantages < 0)
    of_all = {
        "positive_share/tokens": above,
        "token_loss": loss,
        "token_loss/positive": torch.where(above, loss, 0),
    }
    return {
        "ratio/mean/positive": mean_metric(ratio, above),
        "ratio/mean/negative": mean_metric(ratio, below),
        **mean_metrics(of_all, batch.loss_mask),
    }


def response_metrics(batch: TokenBatch) -> dict[str, Metric]:
    """Mean and mean square of w_i = prod_t rho_t over responses with trained tokens; `summarise` computes
    ``ess/responses`` from them.

    The log-ratio of each token is clamped, and so is their sum, at +-SEQUENCE_LOG_RATIO_LIMIT.
    """
    l, _ = log_ratio(batch.logprobs.detach(), batch.rollout_logprobs, batch.loss_mask)
    sums = sequence_sum(l, batch.cu_seqlens, batch.shard).clamp(-SEQUENCE_LOG_RATIO_LIMIT, SEQUENCE_LOG_RATIO_LIMIT)
    trains = sequence_sum(batch.loss_mask, batch.cu_seqlens, batch.shard) > 0
    if batch.shard is not None and batch.shard.rank:
        trains = torch.zeros_like(trains)  # only the first of the ranks that share sequences counts them
    return {
        "response_ratio/mean": mean_metric(sums.exp(), trains),
        "response_ratio/square_mean": mean_metric((2 * sums).exp(), trains),
    }


def dampen_metrics(
    ratio: torch.Tensor, prefix: torch.Tensor, batch: TokenBatch, name: str, dampened_below: float
) -> dict[str, Metric]:
    """How selectively an effective ratio dampens tokens after an unlikely prefix (Prefix-Ratio GRPO, Table 2).

    Two metrics: the share of tokens with an effective ratio ``ratio`` [T] below ``dampened_below``, after good prefixes
    (m_t >= .8) and after bad ones. prefix: log m_t [T]. Selectivity, which `summarise` adds, is the share after bad
    prefixes divided by that after good ones.
    """
    dampened = (ratio.detach() < dampened_below).double()
    bad = prefix < math.log(BAD_PREFIX)
    return {
        f"{name}/good_prefix": mean_metric(dampened, batch.loss_mask & ~bad),
        f"{name}/bad_prefix": mean_metric(dampened, batch.loss_mask & bad),
    }
