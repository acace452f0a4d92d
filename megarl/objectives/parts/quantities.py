"""What rules need of a token's whole sequence, such as ``@rule(first_trigger)``.

A quantity takes the clamped log-ratios [T] (0 where not trained), the batch and the rule's parameters, and returns a
`Sequence` of [S] tensors or, if its rules have ``per_token=True``, of [T] tensors, also where ranks share sequences.
A new one is a function of this kind, here or in the objective's file.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megarl.batch import TokenBatch
from megarl.kernels.constants import LAST_PLACE, NEVER
from megarl.kernels.token_pass.language import Sequence, computed
from megarl.kernels.tokens import tie_places
from megarl.objectives.parts.ratios import sequence_log_ratio
from megarl.objectives.parts.sequences import sequence_min


@computed
def sum_log_ratio(l: torch.Tensor, batch: TokenBatch, parameters: tuple[Any, ...]) -> Sequence:
    """The sum of the log-ratios."""
    return Sequence(sequence_log_ratio(l, batch, mean=False), None)


@computed
def mean_log_ratio(l: torch.Tensor, batch: TokenBatch, parameters: tuple[Any, ...]) -> Sequence:
    """The mean of the trained tokens' log-ratios, 0 without any."""
    return Sequence(sequence_log_ratio(l, batch, mean=True), None)


@computed
def first_trigger(l: torch.Tensor, batch: TokenBatch, parameters: tuple[Any, ...]) -> Sequence:
    """The position of the first trigger, a trained token with A < 0 and a ratio below the last parameter, or NEVER."""
    fires = batch.loss_mask & (batch.advantages < 0) & (l.exp() < parameters[-1])
    index = torch.where(fires, batch.positions, NEVER)
    return Sequence(None, sequence_min(index, NEVER, batch.cu_seqlens, batch.shard))


def last_tie(l: torch.Tensor, batch: TokenBatch, parameters: tuple[Any, ...]) -> Sequence:
    """The position of the last token that comes before the last parameter in M2PO's tie order, -1 for none."""
    index = LAST_PLACE - parameters[-1] - tie_places(replace(batch, shard=None))
    return Sequence(None, index.clamp(-1, NEVER))
