"""``megarl stage ingest``: a run with a sealed first stage, made of responses that other systems generated and scored.

A row of JSON lines or Parquet is a response, with the column names of a shard. Several files become one stage, and the
responses of a group may be in different files. The run directory is either made completely or not at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megarl.data.prompts import banned_prompts
from megarl.errors import UserError
from megarl.foreign import parse_json, quoted, shown
from megarl.models.hf_config import read_hf_config
from megarl.recipe.load import Overrides, explain, load_recipe
from megarl.recipe.tables import Recipe
from megarl.storage.files import atomic_directory, check_new
from megarl.storage.policies import check_weight_files, copy_policy, read_info
from megarl.storage.rollouts import Group, Response, RolloutWriter, seal
from megarl.storage.run_dir import RunDir, Stage
from megarl.storage.shards import validate

SHARD_GROUPS = 16  # groups of a shard
_BATCH = 16  # rows of a Parquet file in memory at a time
_Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
_Version = Annotated[int, Field(ge=-(2**31), le=0)]  # 0: the policy with which the stage begins; -n: n updates older


class _Row(BaseModel):
    """A row of a file, which is a response: its columns that are not null. `_response` checks what goes together."""

    model_config = ConfigDict(extra="forbid", strict=True)

    group_id: int | str
    prompt_tokens: list[_Int32] = Field(min_length=1)
    response_tokens: list[_Int32] = Field(min_length=1)
    rollout_logprobs: list[float | None]  # of tokens that the policy did not sample they have no meaning
    reward: Any
    loss_mask: list[bool | Literal[0, 1]] | None = None
    finish_reason: Literal["stop", "length", "timeout"] = "stop"
    policy_version: _Version = 0
    policy_versions: list[_Version] | None = None
    correct: Literal[0, 1] | None = None
    weights_hash: str | None = None


@dataclass
class _Pending:
    """A group, of which more responses may follow."""

    number: int
    first_row: str  # "FILE, row N"
    prompt: list[int]
    seen: int = 0  # responses read so far
    responses: list[Response] = field(default_factory=list)  # empty again once the group is complete


def ingest(recipe_path: Path, overrides: Overrides, files: Sequence[Path], target: Path, ignored: Sequence[str]) -> str:
    """Make the run directory ``target`` with a sealed stage 0; returns the text to print.

    Groups are numbered in the order of their first rows in ``files``. `UserError` with file and row for anything that
    does not fit the recipe, its model or the other rows. ``ignored``: columns to skip. Groups whose prompts are held
    out for evaluation are left out.
    """
    recipe, target = load_recipe(recipe_path, overrides), target.resolve()
    check_filled(recipe)
    read_hf_config(recipe.model.path)  # before the weights are copied
    check_weight_files(recipe.model.path)
    check_new(target)
    with atomic_directory(target) as temporary:
        run = RunDir.create(temporary, recipe)
        stage = run.stage(0)
        info = copy_policy(recipe.model.path, recipe.model.tokenizer_path, stage.policy)
        heldout: set[int | str] = set()
        groups = _groups((row for path in files for row in _read_rows(path, ignored)), stage, heldout)
        responses = tokens = 0
        with RolloutWriter(stage.rollouts, weights_hash=info.weights_hash, logprob_mode="processed") as writer:
            while shard := list(itertools.islice(groups, SHARD_GROUPS)):
                writer.append(shard)
                responses += sum(len(group.responses) for group in shard)
                tokens += sum(response.sampled_tokens for group in shard for response in group.responses)
        seal(stage.rollouts, stage.groups, external=True)
        stage.log_event(
            "ingested",
            files=[path.name for path in files],
            responses=responses,
            sampled_tokens=tokens,
            left_out=len(heldout),
        )
    skipped = f"left out {len(heldout)} groups whose prompts are held out for evaluation\n"
    return (
        f"{skipped if heldout else ''}"
        f"wrote {target}: {recipe.groups_per_stage} groups, {responses} responses, {tokens} sampled tokens\n"
        f"next    megarl audit {quoted(target)}\n"
        f"        megarl optimize {quoted(target)} --stage 0"
    )


def check_filled(recipe: Recipe) -> None:
    """`UserError` for a recipe whose stages cannot be filled from outside, with rows or by agents."""
    if not recipe.schedule.one_policy:
        raise UserError('[schedule] kind = "live" generates its own rollouts: only a staged run can be filled')
    if recipe.rollout.oversample > 1:
        raise UserError(
            "rollout.oversample selects from generated groups, but all groups from outside are trained: set it to 1"
        )
    if recipe.actor.trains_recorded_experts:
        raise UserError(
            '[actor] routing_replay = "engine": responses from outside have no routed experts; use "actor" or "none"'
        )


def _read_rows(path: Path, ignored: Sequence[str]) -> Iterator[tuple[str, _Row]]:
    """("FILE, row N", row) of every row of a file that ends in .jsonl or .parquet, without the ``ignored`` columns."""
    try:
        for where, row in _values(path):
            if not isinstance(row, dict):
                raise UserError(f"{where} is not an object, but {shown(row)}")
            try:
                columns = {name: value for name, value in row.items() if value is not None and name not in ignored}
                yield where, _Row.model_validate(columns)
            except ValidationError as error:
                first = error.errors()[0]
                skip = "; --ignore COLUMN skips it" if first["type"] == "extra_forbidden" else ""
                raise UserError(f"{where}: {explain(dict(first), _Row, 'row')}{skip}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except pa.ArrowException as error:
        raise UserError(f"{path} is not a valid Parquet file: {str(error).splitlines()[0]}") from error


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    """("FILE, row N", value) of every row of a file; empty lines are skipped, as in prompt files."""
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(_BATCH) for row in batch.to_pylist())
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
    elif path.suffix == ".jsonl":
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                where = f"{path}, row {number}"
                try:
                    if line.strip():
                        yield where, parse_json(line)
                except ValueError as error:
                    raise UserError(f"{where} is not JSON: {error}") from error
    else:
        raise UserError(f"{path}: expected a file that ends in .jsonl or .parquet")


def _groups(rows: Iterator[tuple[str, _Row]], stage: Stage, heldout: set[int | str]) -> Iterator[Group]:
    """Yield each group as soon as it has all its responses; `UserError` if it has too many or, at the end, too few.

    Groups whose prompts are held out for evaluation are skipped, and ``heldout`` gets their names.
    """
    recipe, banned = stage.run.recipe, banned_prompts(stage.run.recipe, stage.policy)
    vocabulary, weights_hash = read_hf_config(stage.policy)["vocab_size"], read_info(stage.policy).weights_hash
    size, expected = recipe.rollout.responses_per_prompt, recipe.groups_per_stage
    pending: dict[int | str, _Pending] = {}
    for where, row in rows:
        name = row.group_id
        if tuple(row.prompt_tokens) in banned:
            heldout.add(name)
            continue
        group = pending.setdefault(name, _Pending(len(pending), where, row.prompt_tokens))
        if group.number >= expected:
            raise UserError(f"{where} begins group {name!r}, number {expected + 1}: {_needed(recipe)}")
        if group.prompt != row.prompt_tokens:
            raise UserError(f"{where}: group {name!r} has other prompt_tokens than in {group.first_row}")
        try:
            group.responses.append(_response(row, recipe, vocabulary, weights_hash))
        except UserError as error:
            text = str(error).removeprefix("group 0, ").removeprefix("response 0, ").removeprefix("response 0: ")
            raise UserError(f"{where}: {text}") from error
        group.seen += 1
        if group.seen > size:
            raise UserError(f"{where}: group {name!r} has more than rollout.responses_per_prompt = {size} responses")
        if group.seen == size:
            yield Group(group.number, np.array(group.prompt, np.int32), tuple(group.responses))
            group.responses.clear()
    for name, group in pending.items():
        if group.seen < size:
            raise UserError(
                f"group {name!r}, which begins in {group.first_row}, has {group.seen} responses, but "
                f"rollout.responses_per_prompt = {size}"
            )
    if len(pending) < expected:
        more = f" ({len(heldout)} more are held out for evaluation)" if heldout else ""
        raise UserError(f"there are {len(pending)} groups{more}: {_needed(recipe)}")


def _response(row: _Row, recipe: Recipe, vocabulary: int, weights_hash: str) -> Response:
    """The checked response of a row; `UserError` if it does not fit the recipe or its model.

    weights_hash: of the policy with which the stage begins.
    """
    for name, tokens, setting, longest in (
        ("prompt_tokens", row.prompt_tokens, "data.max_prompt_tokens", recipe.data.max_prompt_tokens),
        ("response_tokens", row.response_tokens, "rollout.max_response_tokens", recipe.rollout.max_response_tokens),
    ):
        if len(tokens) > longest:
            raise UserError(f"{name} has {len(tokens)} tokens, more than {setting} = {longest}")
        if max(tokens) >= vocabulary:
            raise UserError(f"{name} must have token ids below {vocabulary}")
    n = len(row.response_tokens)
    sampled = np.array([True] * n if row.loss_mask is None else row.loss_mask, bool)
    versions = np.array([row.policy_version] * n if row.policy_versions is None else row.policy_versions, np.int32)
    with np.errstate(over="ignore"):  # infinities are refused below
        logprobs = np.array(row.rollout_logprobs, np.float32)
    for name, entries in (("rollout_logprobs", logprobs), ("loss_mask", sampled), ("policy_versions", versions)):
        if len(entries) != n:
            raise UserError(f"{name} has {len(entries)} entries, but response_tokens has {n}")
    if (np.diff(versions[sampled]) < 0).any():
        raise UserError("policy_versions must never decrease: a response is only continued under newer policies")
    if row.weights_hash not in (None, weights_hash):
        raise UserError(f"weights_hash is not {weights_hash}, that of the policy with which the stage begins")
    found = Response(
        np.array(row.response_tokens, np.int32),
        np.where(sampled, logprobs, np.float32(0)),
        row.reward,
        row.finish_reason,
        int(versions[0]),
        versions if (versions != versions[0]).any() else None,
        correct=row.correct,
        loss_mask=None if sampled.all() else sampled,
    )
    validate([Group(0, np.array(row.prompt_tokens, np.int32), (found,))])
    if row.correct is None and not 0 <= row.reward <= 1:
        raise UserError(f"reward is {row.reward:g}: add the column correct, 1 or 0, which a reward from 0 to 1 may be")
    return found


def _needed(recipe: Recipe) -> str:
    schedule = recipe.schedule
    return (
        f"the recipe needs {recipe.groups_per_stage}, schedule.prompts_per_update = {schedule.prompts_per_update} for "
        f"each of {schedule.updates_per_pass} updates (schedule.updates_per_stage)"
    )
