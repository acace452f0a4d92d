"""Rollouts: every shard, group and response against ledger, seal, recipe and schedule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megarl.errors import UserError
from megarl.rewards import Score, is_scored
from megarl.rewards.parts import by_length, total
from megarl.storage.json_lines import read_intact_lines
from megarl.storage.ledger import LedgerEntry, sealed_external, verify_shard
from megarl.storage.rollouts import Group, RolloutStore
from megarl.storage.run_dir import RunDir, Stage
from megarl.storage.shards import FIRST_VERSION, Shard, any_unfinished, validate
from megarl.views.audit.totals import StageTotals


def check_rollouts(run: RunDir, totals: list[StageTotals]) -> Iterator[str]:
    compared = _compared_stages(run)
    for stage in run.stages():
        if not stage.rollouts.exists():
            continue
        try:
            store = RolloutStore(stage.rollouts, one_policy=run.recipe.schedule.kind == "staged")
        except UserError as error:
            yield str(error)
            continue
        row = totals[stage.number]
        row.generated, row.tokens = len(store.group_ids), sum(entry.tokens for entry in store.entries)
        row.not_chosen = len(store.group_ids) - len(store.chosen)
        yield from _check_choice(stage, store)
        for entry in store.entries:
            yield from check_shard(stage, stage.rollouts, entry)
        if store.external:
            continue  # no engine of this run generated it
        if store.entries and stage.number not in compared and not stage.rollouts.is_symlink():
            yield f"events.jsonl has no weight_drift of stage {stage.number}: no engine was compared with the actor"


def _compared_stages(run: RunDir) -> set[int]:
    events = read_intact_lines(run.events)[0] if run.events.is_file() else []
    return {event["stage"] for event in events if event.get("event") == "weight_drift"}


def _check_choice(stage: Stage, store: RolloutStore) -> Iterator[str]:
    where, wanted = f"stage {stage.number}", stage.run.recipe.groups_per_stage
    if stage.rollouts.is_symlink() and wanted < len(store.chosen):
        return  # of the run that this one branched from, in batches of another size
    partial = stage.run.recipe.rollout.token_budget is not None  # then `carried` looks at that
    if not partial and (foreign := [group for group in store.group_ids if group not in stage.groups]):
        yield f"{where} has group {foreign[0]}, which is of another stage"
    if not stage.is_sealed():
        return
    if len(store.chosen) != wanted:
        yield f"{where} is sealed with {len(store.chosen)} groups to train, but the recipe says {wanted}"
    if gone := [group for group in store.chosen if store.missing([group])]:
        yield f"{where} is sealed, but group {gone[0]} is in no shard"


def check_shard(stage: Stage, directory: Path, entry: LedgerEntry) -> Iterator[str]:
    path = directory / entry.shard
    try:
        verify_shard(path, entry)
        shard = Shard(path)
        groups = [shard.group(group) for group in shard.rows]
        validate(groups)
    except (UserError, OSError, ValueError, KeyError) as error:
        yield f"{path}: {error}"
        return
    responses = [response for group in groups for response in group.responses]
    sums = (tuple(shard.rows), len(responses), sum(len(r.tokens) for r in responses), sum(r.reward for r in responses))
    for name, expected, held in zip(
        ("groups", "responses", "tokens", "reward_sum"),
        (entry.groups, entry.responses, entry.tokens, entry.reward_sum),
        sums,
        strict=True,
    ):
        if expected != held:
            yield f"{path} has {name} {_short(held)}, but its line in the ledger says {_short(expected)}"
    for group in groups:
        problems = [*_check_end(stage, directory, group), *_check_group(stage, group)]
        yield from (f"{path}, group {group.group_id}: {problem}" for problem in problems)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 60 else f"{text[:57]}..."


def _check_end(stage: Stage, directory: Path, group: Group) -> Iterator[str]:
    if any_unfinished(group.responses) != (directory == stage.unfinished):
        yield "an unfinished response" if directory == stage.rollouts else "no unfinished response"
    if directory == stage.unfinished and any(response.reward for response in group.responses):
        yield "rewards, though it is not complete"


def _check_group(stage: Stage, group: Group) -> Iterator[str]:
    recipe = stage.run.recipe
    if len(group.responses) != stage.rollout.responses_per_prompt:
        yield f"{len(group.responses)} responses, not {stage.rollout.responses_per_prompt}"
    if len(group.prompt_tokens) > recipe.data.max_prompt_tokens:
        yield f"a prompt of {len(group.prompt_tokens)} tokens, more than data.max_prompt_tokens"
    oldest, newest = versions_allowed(stage, group.group_id)
    external = sealed_external(stage.rollouts)
    if external:
        oldest = FIRST_VERSION
    right = [response.correctness == 1 for response in group.responses]
    for_length = by_length([len(response.tokens) for response in group.responses], right, recipe.reward)
    for number, response in enumerate(group.responses):
        if len(response.tokens) > stage.rollout.max_response_tokens:
            yield f"response {number} has {len(response.tokens)} tokens, more than rollout.max_response_tokens"
        versions = response.versions[response.sampled]
        if versions.min() < oldest or versions.max() > newest or (np.diff(versions) < 0).any():
            yield (
                f"response {number} has tokens of policy versions {versions.min()} to {versions.max()}, but the "
                f"schedule allows {oldest} to {newest}"
            )
        if external or any_unfinished(group.responses):
            continue  # who gave the reward knows what for; and where one is unfinished, none has a reward
        unscored = total(Score(0.0), len(response.tokens), recipe.reward, stage.rollout.max_response_tokens)[0]
        if not is_scored(response.finish_reason, recipe.reward) and response.reward != unscored + for_length[number]:
            yield f"response {number} was not scored ({response.finish_reason}), but has reward {response.reward:g}"


def versions_allowed(stage: Stage, group_id: int) -> tuple[int, int]:
    """The oldest and the newest policy version that may have sampled a token of the group."""
    schedule = stage.run.recipe.schedule
    if schedule.kind == "staged":
        begun = stage.run.recipe.stage_that_begins(group_id) if stage.run.recipe.mixes_policies else stage.number
        return stage.run.stage(min(stage.number, begun)).first_update, stage.first_update
    batch = group_id // schedule.prompts_per_update
    if schedule.lag_rule.delay is not None:
        exact = schedule.lag_rule.exact(batch)
        return exact, exact
    return max(0, batch - schedule.lag_rule.max_lag), batch
