"""``megarl stage ingest``: a run with a sealed first stage, made of responses that other systems generated and scored.

A row of JSON lines or Parquet is a response, with the column names of a shard. Several files become one stage, and the
responses of a group may be in different files. The run directory is either made completely or not at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.data.prompts import banned_prompts
from megarl.errors import UserError, did_you_mean
from megarl.foreign import parse_json, quoted, shown
from megarl.models.hf_config import read_hf_config
from megarl.recipe.load import Overrides, load_recipe
from megarl.recipe.tables import Recipe
from megarl.storage.files import atomic_directory, check_new
from megarl.storage.policies import check_weight_files, copy_policy, read_info
from megarl.storage.rollouts import Group, Response, RolloutWriter, seal
from megarl.storage.run_dir import RunDir, Stage
from megarl.storage.shards import UNFINISHED, validate

REQUIRED = ("group_id", "prompt_tokens", "response_tokens", "rollout_logprobs", "reward")
OPTIONAL = ("loss_mask", "finish_reason", "policy_version", "policy_versions", "correct", "weights_hash")
SHARD_GROUPS = 16  # groups of a shard
_BATCH = 16  # rows of a Parquet file in memory at a time


@dataclass(frozen=True)
class _Row:
    """A row of a file, which is a response. What is wrong with it is a `UserError` that names file and row."""

    where: str  # "FILE, row N"
    columns: dict[str, Any]  # those that are not null

    def wrong(self, what: str) -> UserError:
        return UserError(f"{self.where}: {what}")

    def array(self, name: str, kind: type, types: tuple[type, ...], sampled: np.ndarray | None = None) -> np.ndarray:
        """Column ``name``, a list of entries of these types, [n] with the dtype ``kind``.

        sampled: [n] bool, which entries count; the others become 0.
        """
        value = self.columns[name]
        if not isinstance(value, list):
            raise self.wrong(f"{name} is {shown(value)}, expected a list")
        counts = [True] * len(value) if sampled is None else sampled.tolist()
        if len(value) != len(counts):
            raise self.wrong(f"{name} has {len(value)} entries, but response_tokens has {len(counts)}")
        for index, entry in enumerate(value):
            if counts[index] and type(entry) not in types:
                raise self.wrong(f"{name}[{index}] is {shown(entry)}, expected {types[0].__name__}")
        try:
            with np.errstate(over="ignore"):  # infinities are refused later
                return np.array([entry if own else 0 for entry, own in zip(value, counts, strict=True)], kind)
        except OverflowError as error:
            raise self.wrong(f"{name}: {error}") from error

    def tokens(self, name: str, vocabulary: int, setting: str, longest: int) -> np.ndarray:
        """A column of token ids, [n] int32. longest: what the recipe has in ``setting``."""
        tokens = self.array(name, np.int32, (int,))
        if len(tokens) > longest:
            raise self.wrong(f"{name} has {len(tokens)} tokens, more than {setting} = {longest}")
        if not len(tokens) or tokens.max() >= vocabulary:
            raise self.wrong(f"{name} must have token ids below {vocabulary}, at least one")
        return tokens

    def response(self, recipe: Recipe, prompt: np.ndarray, vocabulary: int, weights_hash: str) -> Response:
        """The checked response to ``prompt``. weights_hash: of the policy with which the stage begins."""
        columns, longest = self.columns, recipe.rollout.max_response_tokens
        tokens = self.tokens("response_tokens", vocabulary, "rollout.max_response_tokens", longest)
        everything = np.ones(len(tokens), bool)
        mask = self.array("loss_mask", np.int32, (bool, int), everything) if "loss_mask" in columns else everything
        if not np.isin(mask, (0, 1)).all():
            raise self.wrong("loss_mask has entries other than true, false, 1 and 0")
        sampled = mask.astype(bool)
        columns.setdefault("policy_versions", [columns.get("policy_version", 0)] * len(tokens))
        versions = self.array("policy_versions", np.int32, (int,), everything)
        if columns.get("policy_version", versions[0]) != versions[0]:
            raise self.wrong("policy_version is not the first entry of policy_versions")
        if versions.max() > 0 or (np.diff(versions[sampled]) < 0).any():
            raise self.wrong(
                "policy_versions must be 0 for the policy with which the stage begins, negative for older ones, and "
                "never decrease: a response is only continued under newer policies"
            )
        if columns.get("weights_hash", weights_hash) != weights_hash:
            raise self.wrong(f"weights_hash is not {weights_hash}, that of the policy with which the stage begins")
        if (reason := columns.get("finish_reason", "stop")) == UNFINISHED:
            raise self.wrong(f"finish_reason is {reason!r}, but only complete responses can be trained")
        reward, correct = columns["reward"], columns.get("correct")
        if correct not in (None, 0, 1):
            raise self.wrong(f"correct is {shown(correct)}, expected 1 or 0")
        found = Response(
            tokens,
            self.array("rollout_logprobs", np.float32, (float, int), sampled),
            reward,
            reason,
            int(versions[0]),
            versions if (versions != versions[0]).any() else None,
            correct=None if correct is None else float(correct),
            loss_mask=None if sampled.all() else sampled,
        )
        try:
            validate([Group(0, prompt, (found,))])
        except UserError as error:
            raise self.wrong(str(error).removeprefix("group 0, ").removeprefix("response 0, ")) from error
        if correct is None and not 0 <= reward <= 1:
            raise self.wrong(f"reward is {reward:g}: add the column correct, 1 or 0, which a reward from 0 to 1 may be")
        return replace(found, reward=float(reward))


@dataclass
class _Pending:
    """A group, of which more responses may follow."""

    number: int
    first_row: str  # "FILE, row N"
    prompt: np.ndarray  # [p] int32
    seen: int = 0  # responses read so far
    responses: list[Response] = field(default_factory=list)  # empty again once the group is complete


def ingest(
    recipe_path: Path,
    overrides: Overrides,
    files: Sequence[Path],
    target: Path,
    ignored: Sequence[str],
    leave_out: bool = False,
) -> str:
    """Make the run directory ``target`` with a sealed stage 0; returns the text to print.

    Groups are numbered in the order of their first rows in ``files``. `UserError` with file and row for anything that
    does not fit the recipe, its model or the other rows. ``ignored``: columns to skip. ``leave_out``: skip groups whose
    prompts are held out for evaluation, instead of refusing them.
    """
    recipe, target = load_recipe(recipe_path, overrides), target.resolve()
    check_filled(recipe)
    if not recipe.model.path.is_dir():
        raise UserError(f"[model] path: {recipe.model.path} is not a directory")
    read_hf_config(recipe.model.path)  # before the weights are copied
    check_weight_files(recipe.model.path)
    check_new(target)
    with atomic_directory(target) as temporary:
        run = RunDir.create(temporary, recipe)
        stage = run.stage(0)
        info = copy_policy(recipe.model.path, recipe.model.tokenizer_path, stage.policy)
        heldout: dict[int | str, str] = {}
        groups = _groups((row for path in files for row in _read_rows(path, ignored)), stage, heldout, leave_out)
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


def _read_rows(path: Path, ignored: Sequence[str]) -> Iterator[_Row]:
    """The rows of a file that ends in .jsonl, .json or .parquet, without the ``ignored`` columns."""
    try:
        for number, row in _values(path):
            where = f"{path}, row {number}"
            if not isinstance(row, dict):
                raise UserError(f"{where} is not an object, but {shown(row)}")
            columns = {name: value for name, value in row.items() if value is not None and name not in ignored}
            if missing := [name for name in REQUIRED if name not in columns]:
                raise UserError(f"{where} has no {missing[0]}")
            for name in row.keys() - {*REQUIRED, *OPTIONAL, *ignored}:
                hint = did_you_mean(name, OPTIONAL)
                raise UserError(f"{where} has an unknown column {name!r}, which --ignore {name} would skip: {hint}")
            yield _Row(where, columns)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except pa.ArrowException as error:
        raise UserError(f"{path} is not a valid Parquet file: {str(error).splitlines()[0]}") from error


def _values(path: Path) -> Iterator[tuple[int, Any]]:
    """(number, value) of every row of a file; empty lines are skipped, as in prompt files."""
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            yield from enumerate((row for batch in file.iter_batches(_BATCH) for row in batch.to_pylist()), 1)
    elif path.suffix == ".jsonl":
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _parsed(line, f"{path}, row {number}")
    elif path.suffix == ".json":
        if not isinstance(rows := _parsed(path.read_bytes(), str(path)), list):
            raise UserError(f"{path}: expected a list of rows, got {type(rows).__name__}")
        yield from enumerate(rows, 1)
    else:
        raise UserError(f"{path}: expected a file that ends in .jsonl, .json or .parquet")


def _parsed(text: bytes, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from error


def _groups(rows: Iterator[_Row], stage: Stage, heldout: dict[int | str, str], leave_out: bool) -> Iterator[Group]:
    """Yield each group as soon as it has all its responses; `UserError` if it has too many or, at the end, too few.

    Groups whose prompts are held out for evaluation are skipped, and ``heldout`` gets their names and first rows; at
    the end they are an error, unless ``leave_out``.
    """
    recipe, banned = stage.run.recipe, banned_prompts(stage.run.recipe, stage.policy)
    vocabulary, weights_hash = read_hf_config(stage.policy)["vocab_size"], read_info(stage.policy).weights_hash
    size, expected = recipe.rollout.responses_per_prompt, recipe.groups_per_stage
    pending: dict[int | str, _Pending] = {}
    for row in rows:
        name = row.columns["group_id"]
        if type(name) is not int and not isinstance(name, str):
            raise row.wrong(f"group_id is {shown(name)}, expected an integer or a string")
        prompt = row.tokens("prompt_tokens", vocabulary, "data.max_prompt_tokens", recipe.data.max_prompt_tokens)
        if tuple(prompt.tolist()) in banned:
            heldout.setdefault(name, row.where)
            continue
        group = pending.setdefault(name, _Pending(len(pending), row.where, prompt))
        if group.number >= expected:
            raise UserError(f"{row.where} begins group {name!r}, number {expected + 1}: {_needed(recipe)}")
        if not np.array_equal(group.prompt, prompt):
            raise row.wrong(f"group {name!r} has other prompt_tokens than in {group.first_row}")
        group.responses.append(row.response(recipe, prompt, vocabulary, weights_hash))
        group.seen += 1
        if group.seen > size:
            raise row.wrong(f"group {name!r} has more than rollout.responses_per_prompt = {size} responses")
        if group.seen == size:
            yield Group(group.number, prompt, tuple(group.responses))
            group.responses.clear()
    if heldout and not leave_out:
        name, where = next(iter(heldout.items()))
        raise UserError(
            f"{len(heldout)} of {len(heldout) + len(pending)} groups have prompts that are held out for evaluation, "
            f"the first is {name!r} in {where}: train on others, or skip them with --leave-out-heldout"
        )
    for name, group in pending.items():
        if group.seen < size:
            raise UserError(
                f"group {name!r}, which begins in {group.first_row}, has {group.seen} responses, but "
                f"rollout.responses_per_prompt = {size}"
            )
    if len(pending) < expected:
        more = f" ({len(heldout)} more are held out)" if heldout else ""
        raise UserError(f"there are {len(pending)} groups{more}: {_needed(recipe)}")


def _needed(recipe: Recipe) -> str:
    schedule = recipe.schedule
    return (
        f"the recipe needs {recipe.groups_per_stage}, schedule.prompts_per_update = {schedule.prompts_per_update} for "
        f"each of {schedule.updates_per_pass} updates (schedule.updates_per_stage)"
    )
