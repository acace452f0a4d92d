"""Computes the actor's log-probs of a few fixed sequences, which an export stores so that engines can be compared.

It also finds the tokens whose log-prob depends on a choice between experts that rounding decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.actor import routing
from megarl.actor.model import PolicyModel
from megarl.actor.packing import Sample, micro_batches
from megarl.actor.schedule import collect, run_micro_batches
from megarl.batch import TokenBatch
from megarl.recipe.megatron import token_alignment

# Router scores of two float32 implementations were measured to differ by up to 6e-7 of a token's largest score
NEARNESS = 2e-6
MOVED = 1e-5  # nats; with the same experts, rounding moves a log-prob by less


def score(
    models: list[PolicyModel], sequences: Sequence[list[int]], budget: int, device: torch.device
) -> list[np.ndarray]:
    """Log-probs at temperature 1 of all but the first token of each sequence, [n - 1] float32, on every rank.

    Collective over all ranks. budget: tokens of a micro-batch.
    """
    samples = [
        Sample(np.array(tokens[:1]), np.array(tokens[1:]), np.zeros(len(tokens) - 1, np.float32), advantage=0.0)
        for tokens in sequences
    ]
    config = models[0].config
    align = token_alignment({"fp8": config.fp8, "fp8_recipe": config.fp8_recipe})
    temperatures = [model.temperature for model in models]
    try:
        for model in models:
            model.temperature = 1.0
        logs = run_micro_batches(models, micro_batches(samples, budget, device, align), collect, forward_only=True)
    finally:
        for model, temperature in zip(models, temperatures, strict=True):
            model.temperature = temperature
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [part for log in logs for part in _parts(log.batch)])
    scores = [np.full(len(tokens) - 1, np.nan, np.float32) for tokens in sequences]
    for sequence, positions, logprobs in (part for rank in everyone for part in rank):
        scores[sequence][positions] = logprobs
    return scores


def tied(
    models: list[PolicyModel],
    sequences: Sequence[list[int]],
    scores: Sequence[np.ndarray],
    budget: int,
    device: torch.device,
) -> list[np.ndarray] | None:
    """[n - 1] bool of each sequence: True from the first token on whose log-prob depends on rounding in a router.

    Where the scores of two experts are equal but for rounding, another implementation may choose the other one. That
    may move the log-probs of this token and of later ones by whole nats. scores: what `score` returned. Other arguments
    as there; collective as well. None for a model without experts.
    """
    if models[0].config.num_moe_experts is None:
        return None
    with routing.second_choices(models, NEARNESS):
        others = score(models, sequences, budget, device)
    return [np.maximum.accumulate(np.abs(a - b) > MOVED) for a, b in zip(scores, others, strict=True)]


def _parts(batch: TokenBatch) -> list[tuple[int, list[int], list[float]]]:
    """(sequence, positions, log-probs at these positions) for each sequence of this rank.

    The prompt is one token, so positions among input tokens, which a shard counts, and among response tokens are equal.
    """
    mask, ids, positions = batch.loss_mask, batch.sequence_ids, batch.positions
    assert batch.sequence_index is not None
    parts = []
    for local, sequence in enumerate(batch.sequence_index.tolist()):
        mine = (ids == local) & mask
        if bool(mine.any()):  # False for the filler of an empty micro-batch
            parts.append((sequence, positions[mine].tolist(), batch.logprobs[mine].tolist()))
    return parts
