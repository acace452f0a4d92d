"""Turns stored groups into the samples that the actor trains, and computes metrics of these."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from megarl.actor.nonfinite import Offender
from megarl.actor.packing import Sample
from megarl.advantages import group_advantages, zero_variance
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import UserError
from megarl.recipe.tables import ModelTable, ObjectiveTable
from megarl.storage.metrics.summary import rewards_of
from megarl.storage.rollouts import Group


def to_samples(groups: list[Group], table: ObjectiveTable, experts: bool = False) -> list[Sample]:
    """All responses of an update with their advantages; the recipe decides whether groups without variance are dropped.

    experts: include the experts that the engine recorded; `UserError` if it recorded none.
    """
    if experts and (lacking := [g.group_id for g in groups if any(r.routed_experts is None for r in g.responses)]):
        raise UserError(
            f'[actor] routing_replay = "engine": group {lacking[0]} has no routed experts, so it was generated under '
            'another recipe; use "actor" or "none"'
        )
    rewards = rewards_of(groups)
    advantages = group_advantages(rewards, table.advantage).tolist()
    keep = ~zero_variance(rewards).numpy() if table.zero_variance == "drop" else np.ones(len(groups), bool)
    samples = [
        Sample(
            prompt_tokens=group.prompt_tokens,
            response_tokens=response.tokens,
            rollout_logprobs=response.rollout_logprobs,
            advantage=advantage,
            trained=bool(kept),
            routed_experts=response.routed_experts if experts else None,
            loss_mask=response.loss_mask,
            group=number,
        )
        for number, (group, row, kept) in enumerate(zip(groups, advantages, keep, strict=True))
        for response, advantage in zip(group.responses, row, strict=True)
    ]
    # if nothing is left to train, one untrained sample keeps the update, so that the schedule keeps its length
    return [sample for sample in samples if sample.trained] or samples[:1]


def throughput(samples: list[Sample], start: float) -> dict[str, Any]:
    """Metrics of the speed of an update that began at ``start``, a value of `time.perf_counter`.

    ``tokens`` counts all tokens that pass through the model, prompts included, ``trained_tokens`` those with a loss.
    """
    tokens, seconds = sum(map(len, samples)), time.perf_counter() - start
    trained = sum(sample.trained_tokens for sample in samples)
    times = {"seconds": round(seconds, 4), "tokens_per_second": round(tokens / seconds, 1)}
    return {"tokens": tokens, "trained_tokens": trained} | times


def tokens_by_group(counts: Sequence[Sequence[int]], samples: Sequence[Sample], groups: int) -> np.ndarray:
    """[groups, 2] int64, trained tokens and those without a gradient, from ``sample_tokens`` of `train_step`."""
    found = np.zeros((groups, 2), np.int64)
    np.add.at(found, [sample.group for sample in samples], np.array(counts)[: len(samples)])
    return found


def lengths_by_sign(samples: Sequence[Sample]) -> dict[str, float]:
    """Mean number of trained response tokens by the sign of the advantage (BAPO, Fig. 6)."""
    found = {}
    for name, sign in (("positive", 1), ("negative", -1)):
        lengths = [s.trained_tokens for s in samples if s.trained and sign * s.advantage > 0]
        if lengths:
            found[f"response_tokens/{name}"] = sum(lengths) / len(lengths)
    return found


def token_texts(ids: Sequence[int], model: ModelTable) -> list[str]:
    """The text of each token id."""
    tokenizer = _tokenizer(model.tokenizer_path)
    return [str(tokenizer.decode([token])) for token in ids]


_tokenizer = functools.cache(load_tokenizer)


def describe(offender: Offender, sample: Sample) -> dict[str, Any]:
    """A line of non_finite.jsonl. Positions count response tokens from 0; non-finite numbers are written as text."""
    shift = len(sample.prompt_tokens) - 1 if offender.whole_sequences else 0
    now = [offender.logprobs.get(i + shift, math.nan) for i in range(len(sample.response_tokens))]

    def numbers(values: Iterable[float]) -> list[float | str]:
        return [float(x) if math.isfinite(x) else str(float(x)) for x in values]

    return {
        "tensor": offender.tensor,
        "positions": [position - shift for position in offender.positions],
        "prompt_tokens": sample.prompt_tokens.tolist(),
        "response_tokens": sample.response_tokens.tolist(),
        "rollout_logprobs": numbers(sample.rollout_logprobs),
        "logprobs": numbers(now),
        "advantage": numbers([sample.advantage])[0],
    }
