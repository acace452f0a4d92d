"""Evaluates an objective with the fused token pass: the same `Terms` as its definition, but from one kernel."""

from __future__ import annotations

import torch

from megarl.batch import TokenBatch
from megarl.kernels.constants import NEVER
from megarl.kernels.token_pass import Inherited, Rule, token_pass
from megarl.kernels.token_pass.outputs import SUMS
from megarl.kernels.tokens import Tokens, tie_places
from megarl.objectives.parts.aggregation import sequence_count
from megarl.objectives.parts.metrics import Metric, mean_metric, token_metrics
from megarl.objectives.parts.prefix_min import min_of_earlier_chunks, segment_minima
from megarl.objectives.parts.sequences import sequence_min, sequence_sum
from megarl.objectives.parts.terms import Terms


def fused_terms(rule: Rule, batch: TokenBatch, aggregation: str, dampened_below: float, backend: str) -> Terms:
    """`Terms` of the objective with this rule; loss and metrics equal those of its definition up to rounding."""
    tokens = Tokens.of(batch)
    places = tie_places(batch) if rule.function.quantity == "ties" else None
    inherited, counts = None, None
    if batch.shard is not None:
        inherited, counts = _inherit(rule, tokens, batch)
    result = token_pass(rule, tokens, inherited, places, backend, dampened_below)
    sums = dict(zip(SUMS, result.sums, strict=True), loss=result.segment_sums[:, 1].sum())
    flags = {"kept": "kept_fraction", "first": rule.first, "second": rule.second}
    metrics = token_metrics(sums, {flag: name for flag, name in flags.items() if name is not None})
    metrics |= {name: (value.double() * sums["tokens"], sums["tokens"]) for name, value in rule.scalars.items()}
    metrics["loss"] = _loss_metric(result.segment_sums, counts, batch, aggregation)
    if batch.entropy is not None:
        metrics["entropy"] = mean_metric(batch.entropy, batch.loss_mask)
    histograms = {"ratio": result.histograms[0], "prefix_min": result.histograms[1]}
    return Terms(result.loss, result.kept, metrics, histograms)


def _loss_metric(
    segment_sums: torch.Tensor, counts: torch.Tensor | None, batch: TokenBatch, aggregation: str
) -> Metric:
    """As `parts.metrics.loss_metric`, computed from the sums of segments. counts [segments]: number of trained tokens
    in the whole sequence to which each segment belongs; None: segments are whole sequences."""
    trained, loss = segment_sums.unbind(1)
    if aggregation == "token_mean":
        return loss.sum(), trained.sum()
    if counts is None:
        return (loss / trained.clamp(min=1)).sum(), (trained > 0).sum().double()
    responses = sequence_count(batch.loss_mask, batch.cu_seqlens, batch.shard)
    return (loss / counts.clamp(min=1)).sum(), responses.double()


def _inherit(rule: Rule, tokens: Tokens, batch: TokenBatch) -> tuple[Inherited, torch.Tensor]:
    """What this rank's chunks need of their whole sequences, and [segments] the number of trained tokens in these. One
    all-gather and two all-reduces of a few numbers per sequence."""
    shard, quantity, l = batch.shard, rule.function.quantity, tokens.log_ratio
    assert shard is not None
    before = min_of_earlier_chunks(segment_minima(l, batch).view(-1, 2), shard).flatten()
    values = torch.stack([l, tokens.mask.to(l.dtype)], 1)
    total, count = sequence_sum(values, batch.cu_seqlens, shard).unbind(1)
    mean = total / count.clamp(min=1) if quantity == "mean" else total
    threshold = rule.parameters[-1] if quantity == "trigger" else 0.0  # 0: nothing triggers
    fires = tokens.mask & (tokens.advantages < 0) & (l.exp() < threshold)
    index = torch.where(fires, batch.positions, NEVER)
    first = sequence_min(index, NEVER, batch.cu_seqlens, shard)[:, None]  # [S, 1], in the whole sequence
    relative = torch.where(first == NEVER, NEVER, first - shard.chunk_starts(batch.cu_seqlens))

    def twice(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(2, output_size=2 * values.numel())

    return Inherited(before, twice(mean).float(), relative.flatten().int()), twice(count)
