"""``megarl stage ingest``: a run with a sealed first stage, made of responses that other systems generated and scored.

A row of JSON lines or Parquet is a response, with the column names of a shard. Several files become one stage, and the
responses of a group may be in different files. The run directory is either made completely or not at all.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.data.prompts import banned_prompts
from megarl.errors import UserError, nearest
from megarl.foreign import bounded, parse_json, quoted
from megarl.models.hf_config import read_hf_config
from megarl.recipe.load import Overrides, load_recipe
from megarl.recipe.tables import Recipe
from megarl.storage.files import atomic_directory, check_new
from megarl.storage.policies import check_weight_files, copy_policy
from megarl.storage.rollouts import Group, Response, RolloutWriter, seal
from megarl.storage.run_dir import RunDir
from megarl.storage.shards import FINISH_REASONS, FIRST_VERSION, LOGPROB_TOLERANCE, UNFINISHED

REQUIRED = ("group_id", "prompt_tokens", "response_tokens", "rollout_logprobs", "reward")
OPTIONAL = ("loss_mask", "finish_reason", "policy_version", "policy_versions", "correct", "weights_hash")
MAX_LINE = 1 << 26  # bytes of a line of JSON: enough for about two million tokens with their log-probs
SHARD_GROUPS = 16  # groups of a shard
_BATCH = 16  # rows of a Parquet file in memory at a time
_FLOAT32 = float(np.finfo(np.float32).max)
_ENDS = tuple(reason for reason in FINISH_REASONS if reason != UNFINISHED)


@dataclass(frozen=True)
class _Row:
    """A row of a file, which is a response. What is wrong with it is a `UserError` that names file and row."""

    where: str  # "FILE, row N"
    columns: dict[str, Any]  # those that are not null

    def wrong(self, what: str) -> UserError:
        return UserError(f"{self.where}: {what}")

    def number(self, name: str) -> float:
        try:
            return bounded(self.columns[name])
        except ValueError as error:
            raise self.wrong(f"{name} {error}") from error

    def entries(
        self,
        name: str,
        kind: type,
        fits: Callable[[Any], bool],
        expected: str,
        length: int | None = None,
        sampled: np.ndarray | None = None,
    ) -> np.ndarray:
        """Column ``name``, a list of entries that ``fits`` accepts, as an array with the dtype ``kind``.

        length: how many there must be. sampled: which entries count; the others are 0.
        """
        value = self.columns[name]
        if not isinstance(value, list):
            raise self.wrong(f"{name} is {str(value)[:40]!r}, expected a list")
        if length not in (None, len(value)):
            raise self.wrong(f"{name} has {len(value)} entries, but response_tokens has {length}")
        counts = [True] * len(value) if sampled is None else sampled.tolist()
        for index, entry in enumerate(value):
            if counts[index] and not fits(entry):
                raise self.wrong(f"{name}[{index}] is {str(entry)[:40]!r}, expected {expected}")
        return np.array([entry if own else 0 for entry, own in zip(value, counts, strict=True)], kind)

    def tokens(self, name: str, vocabulary: int, setting: str, longest: int) -> np.ndarray:
        """A column of token ids, [n] int32. longest: what the recipe has in ``setting``."""

        def fits(token: Any) -> bool:
            return type(token) is int and 0 <= token < vocabulary

        tokens = self.entries(name, np.int32, fits, f"a token id below {vocabulary}")
        if not len(tokens):
            raise self.wrong(f"{name} is empty")
        if len(tokens) > longest:
            raise self.wrong(f"{name} has {len(tokens)} tokens, more than {setting} = {longest}")
        return tokens

    def mask(self, length: int) -> np.ndarray:
        """Which tokens the policy sampled, [n] bool."""
        self.columns.setdefault("loss_mask", [True] * length)

        def fits(entry: Any) -> bool:
            return isinstance(entry, bool | int) and entry in (0, 1)

        mask = self.entries("loss_mask", bool, fits, "true, false, 1 or 0", length)
        if not mask.any():
            raise self.wrong("loss_mask masks all tokens, so there is nothing to train")
        return mask

    def logprobs(self, sampled: np.ndarray) -> np.ndarray:
        """The log-probs, [n] float32; 0 of tokens that the policy did not sample."""

        def fits(entry: Any) -> bool:
            is_number = isinstance(entry, int | float) and not isinstance(entry, bool)
            return is_number and -_FLOAT32 <= entry <= LOGPROB_TOLERANCE

        expected = "nats, finite and at most 0"
        return self.entries("rollout_logprobs", np.float32, fits, expected, len(sampled), sampled)

    def versions(self, sampled: np.ndarray) -> np.ndarray:
        """The policy version of each token, [n] int32; that of the policy with which the stage begins is 0."""
        self.columns.setdefault("policy_versions", [self.columns.get("policy_version", 0)] * len(sampled))

        def fits(version: Any) -> bool:
            return type(version) is int and FIRST_VERSION <= version <= 0

        expected = "an integer: 0 for the policy with which the stage begins, negative for older ones"
        versions = self.entries("policy_versions", np.int32, fits, expected, len(sampled))
        if (np.diff(versions[sampled]) < 0).any():
            raise self.wrong("policy_versions decrease, but a response is only continued under newer policies")
        if self.columns.get("policy_version", versions[0]) != versions[0]:
            raise self.wrong("policy_version is not the first entry of policy_versions")
        return versions

    def response(self, recipe: Recipe, vocabulary: int, weights_hash: str) -> Response:
        """The checked response. weights_hash: of the policy with which the stage begins."""
        longest = recipe.rollout.max_response_tokens
        tokens = self.tokens("response_tokens", vocabulary, "rollout.max_response_tokens", longest)
        sampled = self.mask(len(tokens))
        logprobs, versions = self.logprobs(sampled), self.versions(sampled)
        if self.columns.get("weights_hash", weights_hash) != weights_hash:
            raise self.wrong(f"weights_hash is not {weights_hash}, that of the policy with which the stage begins")
        reason = self.columns.get("finish_reason", "stop")
        if reason not in _ENDS:
            raise self.wrong(f"finish_reason is {str(reason)[:40]!r}, not one of {', '.join(_ENDS)}")
        correct = self.number("correct") if "correct" in self.columns else None
        if correct not in (None, 0.0, 1.0):
            raise self.wrong(f"correct is {correct:g}, expected 1 or 0")
        reward = self.number("reward")
        if correct is None and not 0 <= reward <= 1:
            raise self.wrong(f"reward is {reward:g}: add the column correct, 1 or 0, which a reward from 0 to 1 may be")
        return Response(
            tokens,
            logprobs,
            reward,
            reason,
            int(versions[0]),
            versions if (versions != versions[0]).any() else None,
            correct=correct,
            loss_mask=None if sampled.all() else sampled,
        )


@dataclass
class _Pending:
    """A group, of which more responses may follow."""

    number: int
    first_row: str  # "FILE, row N"
    prompt: bytes  # sha256 of its tokens
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
    _check_recipe(recipe)
    check_new(target)
    with atomic_directory(target) as temporary:
        run = RunDir.create(temporary, recipe)
        stage = run.stage(0)
        info = copy_policy(recipe.model.path, recipe.model.tokenizer_path, stage.policy)
        banned, heldout = banned_prompts(recipe, stage.policy), dict[int | str, str]()
        rows = (row for path in files for row in _read_rows(path, ignored))
        groups = _groups(rows, recipe, vocabulary_size(stage.policy), info.weights_hash, banned, heldout, leave_out)
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
        f"next    megarl audit {quoted(target)}   # are the log-probs those of {recipe.model.path}?\n"
        f"        megarl optimize {quoted(target)} --stage 0"
    )


def _check_recipe(recipe: Recipe) -> None:
    if not recipe.model.path.is_dir():
        raise UserError(f"[model] path: {recipe.model.path} is not a directory")
    read_hf_config(recipe.model.path)  # before the weights are copied
    check_weight_files(recipe.model.path)
    check_filled(recipe)


def check_filled(recipe: Recipe) -> None:
    """`UserError` for a recipe whose stages cannot be filled from outside, with rows or by agents."""
    if recipe.schedule.kind == "live":
        raise UserError('[schedule] kind = "live" generates its own rollouts: only a staged run can be filled')
    if recipe.rollout.oversample > 1:
        raise UserError(
            "rollout.oversample selects from generated groups, but all groups from outside are trained: set it to 1"
        )
    if recipe.actor.routing_replay == "engine":
        raise UserError(
            '[actor] routing_replay = "engine": responses from outside have no routed experts; use "actor" or "none"'
        )


def vocabulary_size(model: Path) -> int:
    """The ``vocab_size`` in the config.json of a model; `UserError` if it has none."""
    size = read_hf_config(model).get("vocab_size")
    if type(size) is not int or size < 1:
        raise UserError(f"{model}/config.json: vocab_size is {str(size)[:60]!a}, expected an integer")
    return size


def _read_rows(path: Path, ignored: Sequence[str]) -> Iterator[_Row]:
    """The rows of a file that ends in .jsonl, .json or .parquet, without the ``ignored`` columns."""
    kinds = {".jsonl": _json_rows, ".json": _listed_rows, ".parquet": _parquet_rows}
    if path.suffix not in kinds:
        raise UserError(f"{path}: expected a file that ends in .jsonl, .json or .parquet")
    try:
        for number, row in kinds[path.suffix](path, ignored):
            where = f"{path}, row {number}"
            if not isinstance(row, dict):
                raise UserError(f"{where} is not an object, but {str(row)[:60]!r}")
            columns = {name: value for name, value in row.items() if value is not None and name not in ignored}
            if missing := [name for name in REQUIRED if name not in columns]:
                raise UserError(f"{where} has no {missing[0]}")
            for name in row.keys() - {*REQUIRED, *OPTIONAL, *ignored}:
                close = nearest(name, OPTIONAL)
                hint = f"did you mean {close!r}? " if close else ""
                raise UserError(f"{where} has an unknown column {name!r}: {hint}Use --ignore {name} to skip it")
            yield _Row(where, columns)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except pa.ArrowException as error:
        raise UserError(f"{path} is not a valid Parquet file: {str(error).splitlines()[0]}") from error


def _json_rows(path: Path, _: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """(number of the line, its value); empty lines are skipped, as in prompt files."""
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
            if len(line) > MAX_LINE:
                raise UserError(
                    f"{path}, row {number} is longer than {MAX_LINE >> 20} MiB: expected one response a line"
                )
            if line.strip():
                try:
                    yield number, parse_json(line)
                except ValueError as error:
                    raise UserError(f"{path}, row {number} is not JSON: {error}") from error


def _listed_rows(path: Path, _: Sequence[str]) -> Iterator[tuple[int, Any]]:
    try:
        rows = parse_json(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(rows, list):
        raise UserError(f"{path}: expected a list of rows, got {type(rows).__name__}")
    yield from enumerate(rows, 1)


def _parquet_rows(path: Path, ignored: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    with pq.ParquetFile(path) as file:
        columns = [name for name in file.schema_arrow.names if name not in ignored]
        batches = file.iter_batches(_BATCH, columns=columns)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)


def _groups(
    rows: Iterator[_Row],
    recipe: Recipe,
    vocabulary: int,
    weights_hash: str,
    banned: frozenset[tuple[int, ...]],
    heldout: dict[int | str, str],
    leave_out: bool,
) -> Iterator[Group]:
    """Yield each group as soon as it has all its responses; `UserError` if it has too many or, at the end, too few.

    Groups whose prompts are ``banned`` are skipped, and ``heldout`` gets their names and first rows; at the end they
    are an error, unless ``leave_out``.
    """
    size, expected = recipe.rollout.responses_per_prompt, recipe.groups_per_stage
    pending: dict[int | str, _Pending] = {}
    for row in rows:
        name = row.columns["group_id"]
        if type(name) is not int and not isinstance(name, str):
            raise row.wrong(f"group_id is {str(name)[:40]!r}, expected an integer or a string")
        prompt = row.tokens("prompt_tokens", vocabulary, "data.max_prompt_tokens", recipe.data.max_prompt_tokens)
        if tuple(prompt.tolist()) in banned:
            heldout.setdefault(name, row.where)
            continue
        digest = hashlib.sha256(prompt.tobytes()).digest()
        group = pending.setdefault(name, _Pending(len(pending), row.where, digest))
        if group.number >= expected:
            raise UserError(f"{row.where} begins group {name!r}, number {expected + 1}: {_needed(recipe)}")
        if group.prompt != digest:
            raise row.wrong(f"group {name!r} has other prompt_tokens than in {group.first_row}")
        group.responses.append(row.response(recipe, vocabulary, weights_hash))
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
