"""The metrics of an update's responses for metrics.jsonl: rewards, lengths and staleness, all and by columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from megarl.storage.rollouts import Group
from megarl.storage.run_dir import Stage

VALUES = 32  # of a column that get metrics of their own


def rewards_of(groups: Sequence[Group]) -> np.ndarray:
    """The rewards of all responses, [groups, responses per group] float64."""
    return np.array([[response.reward for response in group.responses] for group in groups])


def summary(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards and lengths; ``correct/mean`` if the reward is more than whether a response is right.

    Also the number of ``discarded_responses``, attempts that the engine returned wrongly, if there are any.
    """
    rewards = rewards_of(groups)
    responses = [response for group in groups for response in group.responses]
    some: dict[str, float] = {}
    if any(response.correct is not None for response in responses):
        some["correct/mean"] = float(np.mean([r.correctness for r in responses]))
    if discarded := sum(response.discarded or 0 for response in responses):
        some["discarded_responses"] = discarded
    return some | {
        "reward/mean": float(rewards.mean()),
        "zero_variance_fraction": float((rewards.min(1) == rewards.max(1)).mean()),
        "response_tokens/mean": float(np.mean([r.sampled_tokens for r in responses])),
        "truncated_fraction": float(np.mean([r.finish_reason != "stop" for r in responses])),
    }


def by_columns(groups: Sequence[Group], columns: Sequence[str], tokens: np.ndarray | None) -> dict[str, float]:
    """``by/COLUMN/VALUE/QUANTITY`` for the `VALUES` most frequent values of each column, "none" where it is missing.

    Quantities: ``accuracy``, ``reward``, ``response_tokens`` (means over responses), ``muted_fraction`` (share of the
    trained tokens without a gradient). tokens: [groups, 2] trained tokens and those without a gradient; None: unknown.
    """
    found: dict[str, float] = {}
    rows = [group.columns for group in groups] if columns else []
    for column in columns:
        members: dict[str, list[int]] = {}
        for number, row in enumerate(rows):
            members.setdefault(_in_name(row.get(column, "none")), []).append(number)
        for value in sorted(members, key=lambda value: (-len(members[value]), value))[:VALUES]:
            place, own = f"by/{_in_name(column)}/{value}", members[value]
            responses = [response for number in own for response in groups[number].responses]
            found[f"{place}/accuracy"] = float(np.mean([r.correctness for r in responses]))
            found[f"{place}/reward"] = float(np.mean([r.reward for r in responses]))
            found[f"{place}/response_tokens"] = float(np.mean([r.sampled_tokens for r in responses]))
            trained, muted = (0, 0) if tokens is None else tokens[own].sum(0).tolist()
            if trained:
                found[f"{place}/muted_fraction"] = muted / trained
    return found


def _in_name(value: object) -> str:
    """A value as a part of the name of a metric, which trackers accept."""
    return re.sub(r"[^\w.+-]", "_", str(value), flags=re.ASCII)[:64] or "_"


def ages(stage: Stage, update: int, groups: Sequence[Group]) -> dict[str, Any]:
    """The staleness of the groups that update number ``update`` of the stage, from 0, trains.

    If several policies generate a stage: statistics over tokens. With several passes also the number of the ``pass``.
    """
    schedule = stage.run.recipe.schedule
    repeated = {"pass": schedule.batch_of(update)[1]} if schedule.passes > 1 else {}
    first, mixed = stage.first_update, stage.run.recipe.mixes_policies
    responses = [response for group in groups for response in group.responses]
    if not mixed and all(r.policy_version == first and r.policy_versions is None for r in responses):
        return repeated | {"staleness": update}
    return repeated | lags(groups, first + update)


def lags(groups: Sequence[Group], version: int) -> dict[str, Any]:
    """The staleness of all sampled tokens, in updates, for policy ``version``: minimum, mean, maximum and counts."""
    versions = np.concatenate([response.versions[response.sampled] for group in groups for response in group.responses])
    found, tokens = np.unique(version - versions, return_counts=True)
    return {
        "staleness": int(found.max()),
        "staleness/min": int(found.min()),
        "staleness/mean": float(np.average(found, weights=tokens)),
        "staleness/max": int(found.max()),
        "staleness/tokens": {str(lag): int(count) for lag, count in zip(found, tokens, strict=True)},
    }
