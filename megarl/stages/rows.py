"""Token-exact responses of other systems: rows of JSON lines or Parquet, each checked before it becomes a `Response`.

A row is a response, and its columns are named as those of a shard. Every mistake names the file and the row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.errors import UserError, nearest
from megarl.recipe.tables import Recipe
from megarl.storage.shards import FINISH_REASONS, FIRST_VERSION, LOGPROB_TOLERANCE, UNFINISHED, Response

REQUIRED = ("group_id", "prompt_tokens", "response_tokens", "rollout_logprobs", "reward")
OPTIONAL = ("loss_mask", "finish_reason", "policy_version", "policy_versions", "correct", "weights_hash")
_BATCH = 16  # rows of a Parquet file that are in memory at a time
MAX_LINE = 1 << 26  # bytes of a row of JSON: about two million tokens with their log-probs
_FLOAT32 = float(np.finfo(np.float32).max)
_ENDS = tuple(reason for reason in FINISH_REASONS if reason != UNFINISHED)
Row = dict[str, Any]


@dataclass(frozen=True)
class Limits:
    """What a row of a stage may be."""

    vocabulary: int
    prompt_tokens: int
    response_tokens: int  # those of tools and users included
    newest: int  # policy version: the one that begins the stage
    weights_hash: str  # of that policy

    @classmethod
    def of(cls, recipe: Recipe, vocabulary: int, newest: int, weights_hash: str) -> Limits:
        longest = recipe.rollout.max_response_tokens
        return cls(vocabulary, recipe.data.max_prompt_tokens, longest, newest, weights_hash)


def read_rows(path: Path, ignored: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """(where it is, row) of a file that ends in .jsonl or .parquet, without the ``ignored`` columns."""
    kinds = {".jsonl": _json_rows, ".parquet": _parquet_rows}
    if path.suffix not in kinds:
        raise UserError(f"{path}: expected a file that ends in .jsonl or .parquet")
    try:
        for number, row in enumerate(kinds[path.suffix](path, ignored), 1):
            where = f"{path}, row {number}"
            if not isinstance(row, dict):
                raise UserError(f"{where} is not an object, but {str(row)[:60]!r}")
            row = {name: value for name, value in row.items() if name not in ignored}
            _check_columns(where, row)
            yield where, row
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except pa.ArrowException as error:
        raise UserError(f"{path} is no Parquet file: {str(error).splitlines()[0]}") from error


def _json_rows(path: Path, _: Sequence[str]) -> Iterator[Any]:
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
            if len(line) > MAX_LINE:
                raise UserError(f"{path}, row {number} is longer than {MAX_LINE >> 20} MiB: a line has one response")
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{path}, row {number} is not JSON: {error}") from error


def _parquet_rows(path: Path, ignored: Sequence[str]) -> Iterator[Row]:
    with pq.ParquetFile(path) as file:
        columns = [name for name in file.schema_arrow.names if name not in ignored]
        for batch in file.iter_batches(_BATCH, columns=columns):
            yield from batch.to_pylist()


def _check_columns(where: str, row: Row) -> None:
    if missing := [name for name in REQUIRED if row.get(name) is None]:
        raise UserError(f"{where} has no {missing[0]}")
    for name in row.keys() - {*REQUIRED, *OPTIONAL}:
        close = nearest(name, OPTIONAL)
        hint = f"did you mean {close!r}? " if close else ""
        raise UserError(f"{where} has a column {name!r}: {hint}--ignore {name} leaves it out")


def prompt_of(where: str, row: Row, limits: Limits) -> np.ndarray:
    """[p] int32."""
    tokens = _tokens(where, "prompt_tokens", row, limits.vocabulary)
    if len(tokens) > limits.prompt_tokens:
        raise UserError(
            f"{where}: prompt_tokens has {len(tokens)}, more than data.max_prompt_tokens = {limits.prompt_tokens}"
        )
    return tokens


def response_of(where: str, row: Row, limits: Limits) -> Response:
    """The checked response. Log-probs of tokens that the policy did not sample are stored as 0, whatever they were."""
    tokens = _tokens(where, "response_tokens", row, limits.vocabulary)
    if len(tokens) > limits.response_tokens:
        raise UserError(
            f"{where}: response_tokens has {len(tokens)}, "
            f"more than rollout.max_response_tokens = {limits.response_tokens}"
        )
    mask = _mask(where, row, len(tokens))
    sampled = np.ones(len(tokens), bool) if mask is None else mask
    logprobs = _logprobs(where, row, sampled)
    version, versions = _versions(where, row, len(tokens), sampled, limits)
    if row.get("weights_hash") not in (None, limits.weights_hash):
        raise UserError(
            f"{where}: weights_hash is not {limits.weights_hash}, that of the policy which begins the stage"
        )
    reason = "stop" if row.get("finish_reason") is None else row["finish_reason"]
    if reason not in _ENDS:
        raise UserError(f"{where}: finish_reason is {str(reason)[:40]!r}, not one of {', '.join(_ENDS)}")
    correct = None if row.get("correct") is None else _number(where, "correct", row)
    if correct not in (None, 0.0, 1.0):
        raise UserError(f"{where}: correct is {correct:g}; it is 1 or 0")
    reward = _number(where, "reward", row)
    return Response(tokens, logprobs, reward, reason, version, versions, correct=correct, loss_mask=mask)


def _list(where: str, name: str, row: Row, length: int | None = None) -> list[Any]:
    value = row[name]
    if not isinstance(value, list):
        raise UserError(f"{where}: {name} is {str(value)[:40]!r}, expected a list")
    if length is not None and len(value) != length:
        raise UserError(f"{where}: {name} has {len(value)} entries, but response_tokens {length}")
    return value


def _tokens(where: str, name: str, row: Row, vocabulary: int) -> np.ndarray:
    value = _list(where, name, row)
    if not value:
        raise UserError(f"{where}: {name} is empty")
    for place, token in enumerate(value):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise UserError(f"{where}: {name}[{place}] is {str(token)[:40]!r}, no token id below {vocabulary}")
    return np.array(value, np.int32)


def _mask(where: str, row: Row, length: int) -> np.ndarray | None:
    """None where the policy sampled all tokens."""
    if row.get("loss_mask") is None:
        return None
    value = _list(where, "loss_mask", row, length)
    for place, kept in enumerate(value):
        if kept not in (0, 1) or not isinstance(kept, bool | int):
            raise UserError(f"{where}: loss_mask[{place}] is {str(kept)[:40]!r}; it is true, false, 1 or 0")
    mask = np.array(value, bool)
    if not mask.any():
        raise UserError(f"{where}: loss_mask has no token that trains")
    return None if mask.all() else mask


def _logprobs(where: str, row: Row, sampled: np.ndarray) -> np.ndarray:
    value = _list(where, "rollout_logprobs", row, len(sampled))
    for place in np.flatnonzero(sampled).tolist():
        logprob = value[place]
        number = isinstance(logprob, int | float) and not isinstance(logprob, bool)
        if not number or not -_FLOAT32 <= logprob <= LOGPROB_TOLERANCE:
            raise UserError(f"{where}: rollout_logprobs[{place}] is {str(logprob)[:40]!r}; nats, finite and at most 0")
    kept = [logprob if own else 0.0 for logprob, own in zip(value, sampled.tolist(), strict=True)]
    return np.array(kept, np.float32)


def _versions(where: str, row: Row, length: int, sampled: np.ndarray, limits: Limits) -> tuple[int, np.ndarray | None]:
    """Of the first token; and of each, where they differ."""
    if row.get("policy_versions") is not None:
        value = _list(where, "policy_versions", row, length)
    else:
        version = row.get("policy_version")
        value = [limits.newest if version is None else version] * length
    for place, version in enumerate(value):
        if type(version) is not int or not FIRST_VERSION <= version <= limits.newest:
            raise UserError(
                f"{where}: the policy version of token {place} is {str(version)[:40]!r}; updates before the run are "
                f"negative, and the policy that begins the stage is {limits.newest}"
            )
    versions = np.array(value, np.int32)
    if (np.diff(versions[sampled]) < 0).any():
        raise UserError(f"{where}: policy_versions go down: a response is continued under newer weights alone")
    if row.get("policy_version") not in (None, value[0]):
        raise UserError(f"{where}: policy_version is not the first of policy_versions")
    return value[0], None if (versions == versions[0]).all() else versions


def _number(where: str, name: str, row: Row) -> float:
    value = row[name]
    if not isinstance(value, int | float) or not -sys.float_info.max <= value <= sys.float_info.max:
        raise UserError(f"{where}: {name} is {str(value)[:40]!r}, no finite number")
    return float(value)
