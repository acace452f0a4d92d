"""How selectively an effective ratio dampens tokens behind an unlikely prefix (Prefix-Ratio GRPO, Table 2)."""

from __future__ import annotations

import math

import torch

from megarl.batch import TokenBatch
from megarl.objectives.terms import Metric, mean_metric

DAMPEN_THRESHOLD = 0.8  # 1 - eps of the paper; the text names no number for either "dampened" or "bad prefix"


def dampen_metrics(
    ratio: torch.Tensor, prefix: torch.Tensor, batch: TokenBatch, name: str = "dampen"
) -> dict[str, Metric]:
    """Share of tokens whose effective ratio [T] is below .8, after good prefixes (m_t >= .8) and after bad ones.

    prefix: log m_t [T]. Selectivity is the share after bad prefixes over that after good ones.
    """
    dampened = (ratio.detach() < DAMPEN_THRESHOLD).double()
    bad = prefix < math.log(DAMPEN_THRESHOLD)
    return {
        f"{name}/good_prefix": mean_metric(dampened, batch.loss_mask & ~bad),
        f"{name}/bad_prefix": mean_metric(dampened, batch.loss_mask & bad),
    }
