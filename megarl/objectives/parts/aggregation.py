"""How per-token losses become one number: sum(weights * loss) / count, with the count over the whole optimizer batch.

`token_mean`: weights 1, count = trained tokens. `sequence_mean`: weights 1 / trained tokens of the response, count =
responses with at least one trained token. Counts are integers that add over data- and context-parallel ranks and
micro-batches; dividing by a local count instead makes the gradient depend on the split.
"""

from __future__ import annotations

import torch

from megarl.batch import ContextShard, segment_ids
from megarl.objectives.parts.sequences import sequence_sum


def token_weights(
    loss_mask: torch.Tensor, cu_seqlens: torch.Tensor, aggregation: str, shard: ContextShard | None = None
) -> torch.Tensor:
    """The weights of the tokens' losses, [T] float32, 0 where loss_mask is False."""
    if aggregation == "token_mean":
        return loss_mask.float()
    lengths = sequence_sum(loss_mask, cu_seqlens, shard)  # [S]
    return loss_mask / lengths[segment_ids(cu_seqlens, loss_mask.numel())].clamp(min=1)


def denominator(
    loss_mask: torch.Tensor, cu_seqlens: torch.Tensor, aggregation: str, shard: ContextShard | None = None
) -> torch.Tensor:
    """0-d int64, this rank's share of the count; sum it over all ranks and micro-batches, then divide once. Responses
    that context-parallel ranks share count on the first of these."""
    if aggregation == "token_mean":
        return loss_mask.sum()
    count = (sequence_sum(loss_mask, cu_seqlens, shard) > 0).sum()
    return count if shard is None or shard.rank == 0 else torch.zeros_like(count)
