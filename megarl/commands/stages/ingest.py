"""``megarl stage ingest``: a run with a sealed first stage, made of responses that other systems generated and scored.

Several files become one stage, and the responses of a group may be in different files. The run directory is either made
completely or not at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megarl.commands.stages.rows import Row, RowLimits, prompt_of, read_rows, response_of, vocabulary_size
from megarl.errors import UserError
from megarl.models.hf_config import read_hf_config
from megarl.recipe.load import Overrides, load_recipe
from megarl.recipe.tables import Recipe
from megarl.storage.files import atomic_directory, check_new
from megarl.storage.policies import check_weight_files, copy_policy
from megarl.storage.rollouts import Group, Response, RolloutWriter, seal
from megarl.storage.run_dir import RunDir

SHARD_TOKENS = 1 << 22  # a shard is written when its responses have this many tokens


@dataclass
class _Pending:
    """A group, of which more responses may follow."""

    number: int
    first_row: str  # "FILE, row N"
    prompt: bytes  # sha256 of its tokens
    seen: int = 0  # responses read so far
    responses: list[Response] = field(default_factory=list)  # empty again once the group is complete


def ingest(recipe_path: Path, overrides: Overrides, files: Sequence[Path], target: Path, ignored: Sequence[str]) -> str:
    """Make the run directory ``target`` with a sealed stage 0; returns the text to print.

    Groups are numbered in the order of their first rows in ``files``. `UserError` with file and row for anything that
    does not fit the recipe, its model or the other rows. ``ignored``: columns to skip.
    """
    recipe, target = load_recipe(recipe_path, overrides), target.resolve()
    _check_recipe(recipe)
    check_new(target)
    with atomic_directory(target) as temporary:
        run = RunDir.create(temporary, recipe)
        stage = run.stage(0)
        info = copy_policy(recipe.model.path, recipe.model.tokenizer_path, stage.policy)
        limits = RowLimits.of(recipe, vocabulary_size(stage.policy), 0, info.weights_hash)
        rows = (row for path in files for row in read_rows(path, ignored))
        responses = tokens = 0
        with RolloutWriter(stage.rollouts, weights_hash=info.weights_hash, logprob_mode="processed") as writer:
            for groups in _shards(_groups(rows, limits, recipe)):
                writer.append(groups)
                responses += sum(len(group.responses) for group in groups)
                tokens += sum(response.sampled_tokens for group in groups for response in group.responses)
        seal(stage.rollouts, stage.groups, external=True)
        stage.log_event("ingested", files=[path.name for path in files], responses=responses, sampled_tokens=tokens)
    return (
        f"wrote {target}: {recipe.groups_per_stage} groups, {responses} responses, {tokens} sampled tokens\n"
        f"next    megarl audit {target}   # are the log-probs those of {recipe.model.path}?\n"
        f"        megarl optimize {target} --stage 0"
    )


def _check_recipe(recipe: Recipe) -> None:
    if not recipe.model.path.is_dir():
        raise UserError(f"[model] path: {recipe.model.path} is not a directory")
    read_hf_config(recipe.model.path)  # before the weights are copied
    check_weight_files(recipe.model.path)
    if recipe.schedule.kind == "live":
        raise UserError(
            '[schedule] kind = "live" generates its own rollouts: rows can only be ingested into a staged run'
        )
    if recipe.rollout.oversample > 1:
        raise UserError("rollout.oversample selects from generated groups: set it to 1, and ingest the groups to train")
    if recipe.actor.routing_replay == "engine":
        raise UserError(
            '[actor] routing_replay = "engine": ingested rows have no routed experts; use "actor" or "none"'
        )


def _groups(rows: Iterator[tuple[str, Row]], limits: RowLimits, recipe: Recipe) -> Iterator[Group]:
    """Yield each group as soon as it has all its responses; `UserError` if it has too many or, at the end, too few."""
    size, expected = recipe.rollout.responses_per_prompt, recipe.groups_per_stage
    pending: dict[int | str, _Pending] = {}
    for where, row in rows:
        name = row["group_id"]
        if type(name) is not int and not isinstance(name, str):
            raise UserError(f"{where}: group_id is {str(name)[:40]!r}, expected an integer or a string")
        prompt = prompt_of(where, row, limits)
        digest = hashlib.sha256(prompt.tobytes()).digest()
        group = pending.setdefault(name, _Pending(len(pending), where, digest))
        if group.number >= expected:
            raise UserError(f"{where} begins group {name!r}, number {expected + 1}: {_expected_groups(recipe)}")
        if group.prompt != digest:
            raise UserError(f"{where}: group {name!r} has other prompt_tokens than in {group.first_row}")
        group.responses.append(response_of(where, row, limits))
        group.seen += 1
        if group.seen > size:
            raise UserError(f"{where}: group {name!r} has more than rollout.responses_per_prompt = {size} responses")
        if group.seen == size:
            yield Group(group.number, prompt, tuple(group.responses))
            group.responses.clear()
    for name, group in pending.items():
        if group.seen < size:
            raise UserError(
                f"group {name!r}, which begins in {group.first_row}, has {group.seen} responses, but "
                f"rollout.responses_per_prompt = {size}"
            )
    if len(pending) < expected:
        raise UserError(f"there are {len(pending)} groups: {_expected_groups(recipe)}")


def _expected_groups(recipe: Recipe) -> str:
    schedule = recipe.schedule
    return (
        f"the recipe needs {recipe.groups_per_stage}, schedule.prompts_per_update = {schedule.prompts_per_update} for "
        f"each of {schedule.updates_per_pass} updates (schedule.updates_per_stage)"
    )


def _shards(groups: Iterator[Group]) -> Iterator[list[Group]]:
    """Collect groups into shards of about `SHARD_TOKENS` response tokens."""
    shard: list[Group] = []
    tokens = 0
    for group in groups:
        shard.append(group)
        tokens += sum(len(response.tokens) for response in group.responses)
        if tokens >= SHARD_TOKENS:
            yield shard
            shard, tokens = [], 0
    if shard:
        yield shard
