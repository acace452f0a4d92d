"""Evaluates an objective with the fused token pass: the same `Terms` as its definition, but from one kernel."""

from __future__ import annotations

import torch

from megarl.batch import TokenBatch
from megarl.kernels.constants import NEVER
from megarl.kernels.token_pass import SUMS, Given, Rule, token_pass
from megarl.kernels.tokens import Tokens
from megarl.objectives.parts.aggregation import denominator
from megarl.objectives.parts.metrics import Metric, mean_metric, token_metrics
from megarl.objectives.parts.prefix_min import min_of_earlier_chunks, segment_minima
from megarl.objectives.parts.sequences import sequence_sum
from megarl.objectives.parts.terms import Terms, sequences_of


def fused_terms(rule: Rule, batch: TokenBatch, aggregation: str, dampened_below: float, backend: str) -> Terms:
    """`Terms` of the objective with this rule; loss and metrics equal those of its definition up to rounding."""
    tokens = Tokens.of(batch)
    counts = None if batch.shard is None else sequence_sum(batch.loss_mask, batch.cu_seqlens, batch.shard)
    result = token_pass(rule, tokens, _given(rule, tokens, batch), backend, dampened_below)
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
    """As `parts.metrics.loss_metric`, computed from the sums of segments. counts [S]: number of trained tokens in the
    whole sequences, of which each has two segments; None: segments are whole sequences."""
    trained, loss = segment_sums.unbind(1)
    if aggregation == "token_mean":
        return loss.sum(), trained.sum()
    if counts is None:
        return (loss / trained.clamp(min=1)).sum(), (trained > 0).sum().double()
    responses = denominator(batch.loss_mask, batch.cu_seqlens, aggregation, batch.shard)
    return (loss / _twice(counts).clamp(min=1)).sum(), responses.double()


def _given(rule: Rule, tokens: Tokens, batch: TokenBatch) -> Given:
    """What the pass cannot compute from a segment alone: of chunks all that concerns the whole sequence, and quantities
    that it does not compute. With a shard one all-gather and up to two all-reduces of a few numbers per sequence."""
    function, shard = rule.function, batch.shard
    if shard is None and (function.quantity is None or function.computed):
        return Given()
    l = tokens.log_ratio
    value, index = sequences_of(rule, l, batch)
    value = None if value is None else value.contiguous()
    if shard is None:
        return Given(None, value, None if index is None else index.int().contiguous())
    before = min_of_earlier_chunks(segment_minima(l, batch).view(-1, 2), shard).flatten()
    if index is not None:  # counted from the start of a segment
        in_segment = index[:, None] - shard.chunk_starts(batch.cu_seqlens)
        index = torch.where(index[:, None] == NEVER, NEVER, in_segment).flatten().int()
    return Given(before, None if value is None else _twice(value), index)


def _twice(values: torch.Tensor) -> torch.Tensor:
    """[S] -> [2 S], one for each of a sequence's two segments."""
    return values.repeat_interleave(2, output_size=2 * values.numel())
