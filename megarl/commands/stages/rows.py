"""Reads responses of other systems, as token ids: rows of JSON lines or Parquet, each checked and made a `Response`.

A row is a response, with the column names of a shard. Every error message names the file and the row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.errors import UserError, nearest
from megarl.models.hf_config import read_hf_config
from megarl.recipe.tables import Recipe
from megarl.storage.shards import FINISH_REASONS, FIRST_VERSION, LOGPROB_TOLERANCE, UNFINISHED, Response

REQUIRED = ("group_id", "prompt_tokens", "response_tokens", "rollout_logprobs", "reward")
OPTIONAL = ("loss_mask", "finish_reason", "policy_version", "policy_versions", "correct", "weights_hash")
_BATCH = 16  # rows of a Parquet file in memory at a time
MAX_LINE = 1 << 26  # bytes of a line of JSON: enough for about two million tokens with their log-probs
_FLOAT32 = float(np.finfo(np.float32).max)
_ENDS = tuple(reason for reason in FINISH_REASONS if reason != UNFINISHED)
Row = dict[str, Any]


@dataclass(frozen=True)
class RowLimits:
    """The limits that the rows of a stage must keep."""

    vocabulary: int  # number of token ids
    prompt_tokens: int  # at most
    response_tokens: int  # at most, including tokens of tools and users
    newest: int  # the newest policy version, that of the policy that begins the stage
    weights_hash: str  # of that policy

    @classmethod
    def of(cls, recipe: Recipe, vocabulary: int, newest: int, weights_hash: str) -> Self:
        longest = recipe.rollout.max_response_tokens
        return cls(vocabulary, recipe.data.max_prompt_tokens, longest, newest, weights_hash)


def vocabulary_size(model: Path) -> int:
    """The ``vocab_size`` in the config.json of a model; `UserError` if it has none."""
    size = read_hf_config(model).get("vocab_size")
    if type(size) is not int or size < 1:
        raise UserError(f"{model}/config.json: vocab_size is {str(size)[:60]!a}, expected an integer")
    return size


def read_rows(path: Path, ignored: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Yield ("FILE, row N", row) from a file that ends in .jsonl or .parquet, without the ``ignored`` columns."""
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
        raise UserError(f"{path} is not a valid Parquet file: {str(error).splitlines()[0]}") from error


def _json_rows(path: Path, _: Sequence[str]) -> Iterator[Any]:
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), 1):
            if len(line) > MAX_LINE:
                raise UserError(
                    f"{path}, row {number} is longer than {MAX_LINE >> 20} MiB: expected one response a line"
                )
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
        raise UserError(f"{where} has an unknown column {name!r}: {hint}Use --ignore {name} to skip it")


def prompt_of(where: str, row: Row, limits: RowLimits) -> np.ndarray:
    """The checked prompt of a row, [p] int32. ``where``, for error messages, is "FILE, row N"."""
    tokens = _tokens(where, "prompt_tokens", row, limits.vocabulary)
    if len(tokens) > limits.prompt_tokens:
        raise UserError(
            f"{where}: prompt_tokens has {len(tokens)} tokens, more than "
            f"data.max_prompt_tokens = {limits.prompt_tokens}"
        )
    return tokens


def response_of(where: str, row: Row, limits: RowLimits) -> Response:
    """The checked response of a row. Log-probs of tokens that the policy did not sample become 0."""
    tokens = _tokens(where, "response_tokens", row, limits.vocabulary)
    if len(tokens) > limits.response_tokens:
        raise UserError(
            f"{where}: response_tokens has {len(tokens)} tokens, "
            f"more than rollout.max_response_tokens = {limits.response_tokens}"
        )
    mask = _mask(where, row, len(tokens))
    sampled = np.ones(len(tokens), bool) if mask is None else mask
    logprobs = _logprobs(where, row, sampled)
    version, versions = _versions(where, row, len(tokens), sampled, limits)
    if row.get("weights_hash") not in (None, limits.weights_hash):
        raise UserError(
            f"{where}: weights_hash is not {limits.weights_hash}, that of the policy with which the stage begins"
        )
    reason = "stop" if row.get("finish_reason") is None else row["finish_reason"]
    if reason not in _ENDS:
        raise UserError(f"{where}: finish_reason is {str(reason)[:40]!r}, not one of {', '.join(_ENDS)}")
    correct = None if row.get("correct") is None else _number(where, "correct", row)
    if correct not in (None, 0.0, 1.0):
        raise UserError(f"{where}: correct is {correct:g}, expected 1 or 0")
    reward = _number(where, "reward", row)
    return Response(tokens, logprobs, reward, reason, version, versions, correct=correct, loss_mask=mask)


def _list(where: str, name: str, row: Row, length: int | None = None) -> list[Any]:
    """Column ``name``, which must be a list; with ``length`` one entry for each token of the response."""
    value = row[name]
    if not isinstance(value, list):
        raise UserError(f"{where}: {name} is {str(value)[:40]!r}, expected a list")
    if length is not None and len(value) != length:
        raise UserError(f"{where}: {name} has {len(value)} entries, but response_tokens has {length}")
    return value


def _tokens(where: str, name: str, row: Row, vocabulary: int) -> np.ndarray:
    value = _list(where, name, row)
    if not value:
        raise UserError(f"{where}: {name} is empty")
    for index, token in enumerate(value):
        if type(token) is not int or not 0 <= token < vocabulary:
            raise UserError(f"{where}: {name}[{index}] is {str(token)[:40]!r}, expected a token id below {vocabulary}")
    return np.array(value, np.int32)


def _mask(where: str, row: Row, length: int) -> np.ndarray | None:
    """The checked loss_mask, [n] bool; None if the policy sampled all tokens."""
    if row.get("loss_mask") is None:
        return None
    value = _list(where, "loss_mask", row, length)
    for index, entry in enumerate(value):
        if entry not in (0, 1) or not isinstance(entry, bool | int):
            raise UserError(f"{where}: loss_mask[{index}] is {str(entry)[:40]!r}, expected true, false, 1 or 0")
    mask = np.array(value, bool)
    if not mask.any():
        raise UserError(f"{where}: loss_mask masks all tokens, so there is nothing to train")
    return None if mask.all() else mask


def _logprobs(where: str, row: Row, sampled: np.ndarray) -> np.ndarray:
    value = _list(where, "rollout_logprobs", row, len(sampled))
    for index in np.flatnonzero(sampled).tolist():
        logprob = value[index]
        is_number = isinstance(logprob, int | float) and not isinstance(logprob, bool)
        if not is_number or not -_FLOAT32 <= logprob <= LOGPROB_TOLERANCE:
            raise UserError(
                f"{where}: rollout_logprobs[{index}] is {str(logprob)[:40]!r}, expected nats, finite and at most 0"
            )
    masked = [logprob if own else 0.0 for logprob, own in zip(value, sampled.tolist(), strict=True)]
    return np.array(masked, np.float32)


def _versions(
    where: str, row: Row, length: int, sampled: np.ndarray, limits: RowLimits
) -> tuple[int, np.ndarray | None]:
    """(policy version of the first token, [n] int32 versions of all tokens or None if they are equal)."""
    if row.get("policy_versions") is not None:
        value = _list(where, "policy_versions", row, length)
    else:
        version = row.get("policy_version")
        value = [limits.newest if version is None else version] * length
    for index, version in enumerate(value):
        if type(version) is not int or not FIRST_VERSION <= version <= limits.newest:
            raise UserError(
                f"{where}: the policy version of token {index} is {str(version)[:40]!r}, expected an integer: "
                f"{limits.newest} for the policy with which the stage begins, less for older ones (also negative)"
            )
    versions = np.array(value, np.int32)
    if (np.diff(versions[sampled]) < 0).any():
        raise UserError(f"{where}: policy_versions decrease, but a response is only continued under newer policies")
    if row.get("policy_version") not in (None, value[0]):
        raise UserError(f"{where}: policy_version is not the first entry of policy_versions")
    return value[0], None if (versions == versions[0]).all() else versions


def _number(where: str, name: str, row: Row) -> float:
    value = row[name]
    if not isinstance(value, int | float) or not -sys.float_info.max <= value <= sys.float_info.max:
        raise UserError(f"{where}: {name} is {str(value)[:40]!r}, expected a finite number")
    return float(value)
