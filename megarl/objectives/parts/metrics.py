"""Metrics as pairs (sum, count), which are added over ranks and micro-batches."""

from __future__ import annotations

import torch

from megarl.batch import TokenBatch
from megarl.kernels.constants import SEQUENCE_LOG_RATIO_LIMIT
from megarl.objectives.parts.aggregation import denominator, token_weights
from megarl.objectives.parts.ratios import log_ratio
from megarl.objectives.parts.sequences import sequence_sum

# (sum, count), float64 0-d: add both over ranks and micro-batches, then divide
Metric = tuple[torch.Tensor, torch.Tensor]


def mean_metric(values: torch.Tensor, where: torch.Tensor) -> Metric:
    """(sum of ``values`` [T] over the tokens where ``where`` [T] is True, number of these), in float64."""
    return torch.where(where, values.detach(), 0).sum(dtype=torch.float64), where.sum(dtype=torch.float64)


def loss_metric(loss: torch.Tensor, batch: TokenBatch, aggregation: str) -> Metric:
    """(sum of weight * loss, denominator): the sums over all ranks, divided, are the loss that is minimised."""
    weights = token_weights(batch.loss_mask, batch.cu_seqlens, aggregation, batch.shard)
    count = denominator(batch.loss_mask, batch.cu_seqlens, aggregation, batch.shard)
    return (loss.detach().double() * weights).sum(), count.double()


def token_metrics(s: dict[str, torch.Tensor], flags: dict[str, str]) -> dict[str, Metric]:
    """The metrics that every objective has, from sums over its trained tokens, as the fused pass and `make_terms` do.

    s: the sums by name (`megarl.kernels.token_pass.SUMS`), and that of the losses. flags: {flag: its metric}.

    ``ratio/mean`` and ``ratio/square_mean`` give the effective sample size mean^2 / square_mean; ``kl/k1`` and
    ``kl/k3`` estimate KL(behaviour || current) from behaviour samples (http://joschu.net/blog/kl-approx.html);
    ``m2/before`` is the mean squared log-ratio of trust-region tokens, ``m2/after`` that of those that are kept. By the
    sign of the advantage: the mean ratio (mu-GRPO, Fig. 3) and ``positive_share/tokens`` (BAPO, Fig. 4); losses of
    tokens with the same sign have the same sign, so `summarise` computes the share of their magnitudes from
    ``token_loss``, the mean loss, and its part from A > 0. ``dampen/token`` and ``dampen/prefix``: share of tokens with
    an effective ratio rho_t, or m_t rho_t, below a threshold, after good prefixes (m_t >= .8) and after bad ones
    (Prefix-Ratio GRPO, Table 2).
    """
    tokens, good_prefix = s["tokens"], s["tokens"] - s["bad_prefix"]
    metrics = {
        "ratio/mean": (s["ratio"], tokens),
        "ratio/square_mean": (s["ratio_square"], tokens),
        "chi2": (s["chi2"], tokens),
        "kl/k1": (-s["log_ratio"], tokens),
        "kl/k3": (s["k3"], tokens),
        "m2/all": (s["square"], tokens),
        "m2/before": (s["trust_square"], s["trust"]),
        "m2/after": (s["trust_kept_square"], s["trust_kept"]),
        "log_ratio_clamp_fraction": (s["clamped"], tokens),
        "ratio/mean/positive": (s["ratio_positive"], s["positive"]),
        "ratio/mean/negative": (s["ratio_negative"], s["negative"]),
        "positive_share/tokens": (s["positive"], tokens),
        "token_loss": (s["loss"], tokens),
        "token_loss/positive": (s["loss_positive"], tokens),
    }
    for flag, name in flags.items():
        metrics[name] = (s[flag], tokens)
        metrics[f"{name}/positive"] = (s[f"{flag}_positive"], s["positive"])
        metrics[f"{name}/negative"] = (s[f"{flag}_negative"], s["negative"])
    for kind in ("token", "prefix"):
        dampened, bad = s[f"dampened_{kind}"], s[f"dampened_{kind}_bad"]
        metrics[f"dampen/{kind}/good_prefix"] = (dampened - bad, good_prefix)
        metrics[f"dampen/{kind}/bad_prefix"] = (bad, s["bad_prefix"])
    return metrics


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
