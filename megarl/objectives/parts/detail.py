"""The papers' diagnostics that cost more than a sum: prefix occupancy, and entropy and probability by the ratio.

They are computed for every objective and backend from the batch and the tokens that keep their gradient. Nothing waits
for the device.
"""

from __future__ import annotations

import math

import torch

from megarl.batch import TokenBatch
from megarl.kernels.constants import SEQUENCE_LOG_RATIO_LIMIT
from megarl.objectives.parts.histograms import histogram
from megarl.objectives.parts.metrics import Metric, mean_metric
from megarl.objectives.parts.prefix_ratio import prefix_log_ratio
from megarl.objectives.parts.ratios import log_ratio

DISTANCES = 16  # bins of |rho - 1|: less than 2^-10, then an octave each, the last one 16 or more
COLUMNS = 2 * DISTANCES  # rho < 1, farthest from 1 first, then rho >= 1
ROWS = 16  # bins of entropy: 1/4 nat each, the last one 3.75 or more; of probability: octaves from (1/2, 1] downwards


def detailed(batch: TokenBatch, kept: torch.Tensor) -> tuple[dict[str, Metric], dict[str, torch.Tensor]]:
    """Metrics and histograms as in `Terms`.

    ``prefix_occupancy``: histogram of log Gamma_t = log prod_{i<t} rho_i (mu-GRPO, Eq. 4), beyond +-20 in the outer
    bins; ``prefix/reverse_chi2``: mean of 1 / Gamma_t - 1, the reverse Pearson divergence of the prefixes (mu-GRPO,
    appendix D), each 1 / Gamma_t at most e^80. ``entropy_by_ratio`` (M2PO, Fig. 4b; BAPO, Fig. 9) and
    ``probability_by_ratio`` (BAPO, Fig. 5): [ROWS, COLUMNS] int64 counts of the current policy's entropy and
    probability against rho. ``covariance/*``: means of log pi, of A X and of their product, X = 1 for tokens that keep
    their gradient and else 0; from these `summarise` computes the covariance of BAPO's Eq. 6, over the batch's tokens.
    """
    mask = batch.loss_mask
    l, _ = log_ratio(batch.logprobs.detach(), batch.rollout_logprobs, mask)
    occupancy = prefix_log_ratio(l, batch, exclusive=True)
    limit = SEQUENCE_LOG_RATIO_LIMIT
    inverse = (-occupancy.double()).clamp(-limit, limit).expm1()
    logprob = torch.where(mask, batch.logprobs.detach(), 0).double()
    unclipped = torch.where(mask & kept, batch.advantages.detach(), 0).double()
    metrics = {
        "prefix/reverse_chi2": mean_metric(inverse, mask),
        "covariance/logprob": mean_metric(logprob, mask),
        "covariance/advantage": mean_metric(unclipped, mask),
        "covariance/product": mean_metric(logprob * unclipped, mask),
    }
    column = _column(l)
    rarity = -logprob / math.log(2)
    histograms = {
        "prefix_occupancy": histogram(occupancy, mask),
        "probability_by_ratio": _table(rarity, column, mask),
    }
    if batch.entropy is not None:
        histograms["entropy_by_ratio"] = _table(4 * batch.entropy.detach(), column, mask)
    return metrics, histograms


def _column(l: torch.Tensor) -> torch.Tensor:
    """[T] log-ratios -> [T] int64 columns."""
    distance = l.double().expm1().abs().nan_to_num()
    octave = (torch.frexp(distance).exponent + 10).clamp(0, DISTANCES - 1).long()  # 2^(e-1) <= distance < 2^e
    octave = torch.where(distance > 0, octave, 0)
    return torch.where(l < 0, DISTANCES - 1 - octave, DISTANCES + octave)


def _table(value: torch.Tensor, column: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[ROWS, COLUMNS] int64 counts of the masked tokens by the whole part of ``value`` [T]."""
    row = torch.where(mask, value, 0).nan_to_num().floor().clamp(0, ROWS - 1).long()
    place = torch.where(mask, row * COLUMNS + column, ROWS * COLUMNS)
    counts = torch.zeros(ROWS * COLUMNS + 1, dtype=torch.int64, device=mask.device)
    return counts.index_add_(0, place, torch.ones_like(place))[:-1].view(ROWS, COLUMNS)
