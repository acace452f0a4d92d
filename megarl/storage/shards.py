"""Groups of scored responses, and shards: Arrow IPC files of some groups, with one row per response."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.errors import UserError
from megarl.foreign import bounded

LOGPROB_TOLERANCE = 1e-4  # nats: the float32 log-softmax of a near-certain token may be a little above 0
FIRST_VERSION = -(2**31)  # the smallest version; external rollouts may come from policies before the run's first one
UNFINISHED = "unfinished"  # the response reached the token budget of its stage, and a later stage continues it
FINISH_REASONS = ("stop", "length", "timeout", UNFINISHED)

SCHEMA = pa.schema(
    [
        ("group_id", pa.int64()),
        ("sample", pa.int32()),
        ("prompt_tokens", pa.list_(pa.int32())),
        ("response_tokens", pa.list_(pa.int32())),
        ("rollout_logprobs", pa.list_(pa.float32())),
        ("reward", pa.float64()),
        ("finish_reason", pa.string()),
        ("policy_version", pa.int64()),
        ("logprob_mode", pa.dictionary(pa.int8(), pa.string())),
        ("weights_hash", pa.dictionary(pa.int8(), pa.string())),
    ]
)
# a shard has one of these columns only if one of its responses has a value in this field, which is null in the others
OPTIONAL = pa.schema(
    [
        ("policy_versions", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("correct", pa.float64()),
        ("answer", pa.string()),
        ("discarded", pa.int32()),
    ]
)
# the experts that the engine recorded, [layers, top_k] per token in the smallest type that holds an expert's id;
# readers that do not use this column pay nothing for it, since the file is mapped
EXPERTS = "routed_experts"
# the row of the data set behind a group's prompt, as in `Group.row`; a shard without one has no such column
ROW, ROW_TYPE = "prompt_row", pa.dictionary(pa.int32(), pa.string())
LONGEST_ROW = 1 << 18  # characters


@dataclass(frozen=True)
class Response:
    """One sampled response of n tokens."""

    tokens: np.ndarray  # [n] int32, stop token included
    rollout_logprobs: np.ndarray  # [n] float32, in nats: the engine's, of the distribution that it sampled from
    reward: float
    finish_reason: str  # one of `FINISH_REASONS`
    policy_version: int  # of the policy that sampled the first token
    policy_versions: np.ndarray | None = None  # [n] int32, of each token, if they are not all the same
    # [prompt + n - 1, layers, top_k] int8 or int16: expert ids of every token but the last; -1: unknown
    routed_experts: np.ndarray | None = None
    correct: float | None = None  # 1 or 0, if that differs from the reward
    answer: str | None = None  # the final answer, by which responses are compared with each other (maj@k)
    # [n] bool; True: the policy sampled the token, so it is trained. False: text of a tool or user between turns, whose
    # log-prob is stored as 0 and has no meaning. None: all True
    loss_mask: np.ndarray | None = None
    discarded: int | None = None  # faulty attempts of the engine that were thrown away before this one, if any

    @property
    def correctness(self) -> float:
        """1 for a right response, 0 for a wrong one."""
        return self.reward if self.correct is None else self.correct

    @property
    def sampled(self) -> np.ndarray:
        """[n] bool, which tokens the policy sampled."""
        return np.ones(len(self.tokens), bool) if self.loss_mask is None else self.loss_mask

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens that the policy sampled."""
        return len(self.tokens) if self.loss_mask is None else int(self.loss_mask.sum())

    @property
    def versions(self) -> np.ndarray:
        """[n] int32, the version of the policy that sampled each token."""
        if self.policy_versions is not None:
            return self.policy_versions
        return np.full(len(self.tokens), self.policy_version, np.int32)


@dataclass(frozen=True)
class Group:
    """All responses to one prompt; a response's sample number is its index in ``responses``."""

    group_id: int
    prompt_tokens: np.ndarray  # [p] int32
    responses: tuple[Response, ...]
    row: str | None = (
        None  # JSON object: source and plain columns of the prompt's row, see `megarl.data.prompts.Prompt`
    )

    @property
    def columns(self) -> dict[str, str | float | bool]:
        """``row`` as an object, {} without one."""
        return json.loads(self.row) if self.row else {}


def any_unfinished(responses: Iterable[Response]) -> bool:
    """Whether a response of a group is unfinished; then none of the group's responses has a reward yet."""
    return any(response.finish_reason == UNFINISHED for response in responses)


class Shard:
    """Reads the groups of a shard. A list column is (offsets, flat values), so that reading a group is slicing."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.prompts, self.tokens, self.logprobs = (
            (batch[name].offsets.to_numpy(), batch[name].values.to_numpy())
            for name in ("prompt_tokens", "response_tokens", "rollout_logprobs")
        )
        self.rewards = batch["reward"].to_numpy()
        self.versions = batch["policy_version"].to_numpy()
        self.finish_reasons = batch["finish_reason"].to_pylist()
        self.optional = {name: batch[name] for name in OPTIONAL.names if name in batch.schema.names}
        self.experts = _experts_column(batch[EXPERTS]) if EXPERTS in batch.schema.names else None
        self.prompt_rows = batch[ROW] if ROW in batch.schema.names else None
        ids, first, count = np.unique(batch["group_id"].to_numpy(), return_index=True, return_counts=True)
        self.rows = {int(i): range(int(f), int(f + n)) for i, f, n in zip(ids, first, count, strict=True)}

    @classmethod
    def open(cls, path: Path) -> Self:
        """The shard of a file, which stays memory-mapped."""
        with pa.memory_map(str(path)) as source:
            return cls(pa.ipc.open_file(source).get_batch(0))

    def group(self, group_id: int) -> Group:
        """One group, as read-only views of the shard."""
        rows = self.rows[group_id]
        prompt = _slice(self.prompts, rows.start)
        row = None if self.prompt_rows is None else self.prompt_rows[rows.start].as_py()
        return Group(group_id, prompt, tuple(self._response(row) for row in rows), row)

    def _response(self, row: int) -> Response:
        return Response(
            tokens=_slice(self.tokens, row),
            rollout_logprobs=_slice(self.logprobs, row),
            reward=float(self.rewards[row]),
            finish_reason=self.finish_reasons[row],
            policy_version=int(self.versions[row]),
            routed_experts=None if self.experts is None else _slice(self.experts, row),
            **{name: _value(column[row]) for name, column in self.optional.items()},
        )


def _value(scalar: pa.Scalar) -> Any:
    """The value of a field in `OPTIONAL`, a list as an array."""
    if isinstance(scalar, pa.ListScalar) and scalar.is_valid:
        return scalar.values.to_numpy(zero_copy_only=False)
    return scalar.as_py()


def validate(groups: Sequence[Group]) -> None:
    """Raise a `UserError` that names the first response with a wrong dtype, shape or value."""
    _check_experts(groups)
    for group in groups:
        where = f"group {group.group_id}"
        _check_tokens(group.prompt_tokens, f"{where}, prompt_tokens")
        _check_row(group, where)
        if not group.responses:
            raise UserError(f"{where} has no responses")
        for index, response in enumerate(group.responses):
            here = f"{where}, response {index}"
            _check_tokens(response.tokens, f"{here}, tokens")
            logprobs = response.rollout_logprobs
            if logprobs.dtype != np.float32 or logprobs.shape != response.tokens.shape:
                raise UserError(
                    f"{here}: rollout_logprobs must be float32 [{len(response.tokens)}] like its tokens, "
                    f"got {logprobs.dtype} {list(logprobs.shape)}"
                )
            if not logprobs.max() <= LOGPROB_TOLERANCE or not np.isfinite(logprobs.min()):  # a NaN fails the first
                raise UserError(f"{here}: log-probs must be finite and <= 0, got {logprobs.min()} to {logprobs.max()}")
            versions, first = response.policy_versions, response.policy_version
            if versions is not None and not (
                versions.dtype == np.int32 and versions.shape == logprobs.shape and versions[0] == first
            ):
                raise UserError(f"{here}: policy_versions must be int32 [{len(logprobs)}] and begin with {first}")
            mask = response.loss_mask
            if mask is not None and not (mask.dtype == bool and mask.shape == logprobs.shape and mask.any()):
                raise UserError(f"{here}: loss_mask must be bool [{len(logprobs)}] with at least one True")
            try:
                bounded(response.reward)
            except ValueError as error:
                raise UserError(f"{here}: the reward {error}") from error
            if response.finish_reason not in FINISH_REASONS:
                raise UserError(f"{here}: finish_reason is {response.finish_reason!r}, not one of {FINISH_REASONS}")


def _check_experts(groups: Sequence[Group]) -> None:
    """`UserError` unless all responses have routed experts with the same layers, top_k and dtype, or none has any."""
    kinds: set[tuple[object, ...] | None] = set()
    for group in groups:
        for index, response in enumerate(group.responses):
            here, experts = f"group {group.group_id}, response {index}", response.routed_experts
            kinds.add(None if experts is None else (experts.dtype, *experts.shape[1:]))
            if len(kinds) > 1:
                raise UserError(
                    f"{here}: routed_experts differ in dtype or shape from those of other responses: {kinds}"
                )
            if experts is None:
                continue
            rows = len(group.prompt_tokens) + len(response.tokens) - 1
            if experts.dtype not in (np.int8, np.int16) or experts.ndim != 3 or len(experts) != rows:
                raise UserError(
                    f"{here}: routed_experts must be int8 or int16 [{rows}, layers, top_k], "
                    f"got {experts.dtype} {list(experts.shape)}"
                )
            if experts.size and experts.min() < -1:
                raise UserError(f"{here}: {experts.min()} in routed_experts is neither an expert nor -1")


def _check_row(group: Group, where: str) -> None:
    try:
        columns = group.columns if len(group.row or "") <= LONGEST_ROW else None
    except (ValueError, RecursionError):
        columns = None
    if not isinstance(columns, dict) or not all(isinstance(value, str | int | float) for value in columns.values()):
        raise UserError(f"{where}: its row must be a JSON object of texts, numbers and truth values")


def _check_tokens(tokens: np.ndarray, where: str) -> None:
    if tokens.dtype != np.int32 or tokens.ndim != 1 or tokens.size == 0:
        raise UserError(f"{where} must be int32 [n] with at least one token, got {tokens.dtype} {list(tokens.shape)}")
    if tokens.min() < 0:
        raise UserError(f"{where}: token {tokens.min()} is negative")


def encode(groups: Sequence[Group], weights_hash: str, logprob_mode: str) -> pa.Buffer:
    """Encode groups as one Arrow IPC file, uncompressed so that it can be mapped."""
    batch = to_batch(groups, weights_hash, logprob_mode)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as file:
        file.write_batch(batch)
    return sink.getvalue()


def to_batch(groups: Sequence[Group], weights_hash: str, logprob_mode: str) -> pa.RecordBatch:
    """The rows of a shard: one for each response."""
    rows = [(group, sample, response) for group in groups for sample, response in enumerate(group.responses)]
    columns: dict[str, Any] = {
        "group_id": [group.group_id for group, _, _ in rows],
        "sample": [sample for _, sample, _ in rows],
        "prompt_tokens": [group.prompt_tokens for group, _, _ in rows],
        "response_tokens": [response.tokens for _, _, response in rows],
        "rollout_logprobs": [response.rollout_logprobs for _, _, response in rows],
        "reward": [float(response.reward) for _, _, response in rows],
        "finish_reason": [response.finish_reason for _, _, response in rows],
        "policy_version": [response.policy_version for _, _, response in rows],
        "logprob_mode": [logprob_mode] * len(rows),
        "weights_hash": [weights_hash] * len(rows),
    }
    schema = SCHEMA
    for field in OPTIONAL:
        values = [getattr(response, field.name) for _, _, response in rows]
        if any(value is not None for value in values):
            schema = schema.append(field)
            columns[field.name] = values
    experts = [response.routed_experts for _, _, response in rows if response.routed_experts is not None]
    if experts:
        columns[EXPERTS] = _experts_array(experts)
        schema = schema.append(pa.field(EXPERTS, columns[EXPERTS].type))
    if any(group.row is not None for group in groups):
        columns[ROW] = [group.row for group, _, _ in rows]
        schema = schema.append(pa.field(ROW, ROW_TYPE))
    return pa.RecordBatch.from_pydict(columns, schema=schema)


def write_parquet(path: Path, groups: Sequence[Group], weights_hash: str, logprob_mode: str) -> None:
    """Write groups as a Parquet file with the columns of a shard, for other machines and programs."""
    pq.write_table(pa.Table.from_batches([to_batch(groups, weights_hash, logprob_mode)]), path)


def read_parquet(path: Path, weights_hash: str, logprob_mode: str, vocabulary: int) -> list[Group]:
    """The groups of a file that `write_parquet` wrote, or a stranger.

    `UserError`, of one line, unless they are valid, encode to the same rows again, and have tokens below
    ``vocabulary``.
    """
    try:
        batch = pq.ParquetFile(path).read().combine_chunks().to_batches()[0]
        shard = Shard(batch)
        groups = [shard.group(group) for group in shard.rows]
        validate(groups)
        if max(tokens.max() for _, tokens in (shard.prompts, shard.tokens)) >= vocabulary:
            raise ValueError(f"a token is outside the vocabulary of {vocabulary}")
        if not FIRST_VERSION <= shard.versions.min() <= shard.versions.max() < -FIRST_VERSION:
            raise ValueError("a policy_version does not fit into 32 bits")
        expected = to_batch(groups, weights_hash, logprob_mode)
        if not batch.cast(expected.schema).equals(expected):
            raise ValueError("its rows are not complete groups of this policy in order")
    except Exception as error:  # a file made on purpose can make every step fail
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} has no valid rollouts: {reason:.300}") from error
    return groups


def _experts_array(arrays: list[np.ndarray]) -> pa.ListArray:
    """The column of routed experts: for each response a list of [layers][top_k]; the column's type has the shape."""
    flat, offsets = np.concatenate(arrays), np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    rows = pa.FixedSizeListArray.from_arrays(flat.reshape(-1), flat.shape[2])
    return pa.ListArray.from_arrays(offsets, pa.FixedSizeListArray.from_arrays(rows, flat.shape[1]))


def _experts_column(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    rows = column.values
    flat = rows.values.values.to_numpy()
    return column.offsets.to_numpy(), flat.reshape(-1, rows.type.list_size, rows.type.value_type.list_size)


def _slice(column: tuple[np.ndarray, np.ndarray], row: int) -> np.ndarray:
    offsets, values = column
    return values[offsets[row] : offsets[row + 1]]
