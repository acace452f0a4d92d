"""Computes the actor's log-probs of a few fixed sequences, which an export stores so that engines can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.actor.model import PolicyModel
from megarl.actor.packing import Sample, micro_batches
from megarl.actor.schedule import collect, run_micro_batches


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
    temperatures = [model.temperature for model in models]
    try:
        for model in models:
            model.temperature = 1.0
        logs = run_micro_batches(models, micro_batches(samples, budget, device), collect, forward_only=True)
    finally:
        for model, temperature in zip(models, temperatures, strict=True):
            model.temperature = temperature
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [log.batch.by_sequence(log.batch.logprobs) for log in logs])
    scores = [np.full(len(tokens) - 1, np.nan, np.float32) for tokens in sequences]
    for sequence, logprobs in (item for rank in everyone for found in rank for item in found.items()):
        if logprobs:  # none in the filler of an empty micro-batch
            # the prompt is one token, so positions among input tokens, which a shard counts, and among those of the
            # response are equal
            scores[sequence][list(logprobs)] = list(logprobs.values())
    return scores
