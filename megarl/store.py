"""The rollout store: memory-mapped Arrow shards and a checksummed ledger that says which of them count.

A group (all responses of a prompt) is there whole or not at all. A shard is synced and renamed into place, then one
synced ledger line names it; a group is present when such a line is. Killed anywhere, the writer drops what no intact
line names and the phase generates only the missing groups again. `seal` freezes the stage.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa

from megarl.errors import UserError
from megarl.files import disk_errors, fsync_path, write_atomic
from megarl.ledger import (
    LEDGER,
    SEALED,
    LedgerEntry,
    check_one_policy,
    check_seal,
    check_size,
    is_sealed,
    lock,
    parse,
    read_ledgers,
    to_line,
    verify_shard,
)

LOGPROB_TOLERANCE = 1e-4  # nats: float32 log-softmax of a near-certain token may come out a little above 0
FINISH_REASONS = ("stop", "length", "timeout")
OPEN_SHARDS = 16  # shards a reader keeps mapped: its memory must not grow with the stage

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


@dataclass(frozen=True)
class Response:
    """One sampled response. ``logprobs`` are the engine's, of the distribution that was sampled, in nats."""

    tokens: np.ndarray  # [n] int32, stop token included
    logprobs: np.ndarray  # [n] float32
    reward: float
    finish_reason: str  # of `FINISH_REASONS`
    policy_version: int


@dataclass(frozen=True)
class Group:
    """All responses of one prompt; a response's sample number is its place in ``responses``."""

    group_id: int
    prompt_tokens: np.ndarray  # [p] int32
    responses: tuple[Response, ...]


class RolloutWriter:
    """Appends groups to one directory. Several writers may share it, each with a number and so with files of its own.

    Raises `UserError` for a sealed stage, a number already in use by a live process, groups of another policy
    (``weights_hash``), damage in the ledger, and a full disk.
    """

    def __init__(self, directory: Path, *, weights_hash: str, logprob_mode: str, writer: int = 0) -> None:
        self.directory, self.writer = Path(directory), writer
        self.weights_hash, self.logprob_mode = weights_hash, logprob_mode
        self._refuse_sealed()
        with disk_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._ledger = lock(self.directory / (f"ledger.{writer:05d}.jsonl" if writer else LEDGER))
        try:
            self._recover()
        except BaseException:
            self.close()
            raise

    def _refuse_sealed(self) -> None:
        if is_sealed(self.directory):
            raise UserError(f"{self.directory} is sealed: a sealed stage takes no more rollouts")

    def _recover(self) -> None:
        self._refuse_sealed()  # again, now that no sealing can be under way
        _, self._length = parse(Path(self._ledger.name))
        os.ftruncate(self._ledger.fileno(), self._length)
        os.fsync(self._ledger.fileno())
        fsync_path(self.directory)
        everything = read_ledgers(self.directory)
        check_one_policy(everything, self.directory, self.weights_hash, self.logprob_mode)
        self._groups = {group for entry in everything for group in entry.groups}
        _remove_orphans(self.directory, f"w{self.writer:05d}_*.arrow", everything)

    def append(self, groups: Sequence[Group]) -> None:
        """Write ``groups`` as one shard and one ledger line: durable on return, none of them present on an error."""
        if not groups:
            return
        groups = sorted(groups, key=lambda group: group.group_id)
        ids = [group.group_id for group in groups]
        _validate(groups)
        repeated = sorted(self._groups.intersection(ids)) + [a for a, b in itertools.pairwise(ids) if a == b]
        if repeated:
            raise UserError(f"group {repeated[0]} is already in {self.directory}: a group is written once")
        payload = _encode(groups, self.weights_hash, self.logprob_mode)
        rewards = [response.reward for group in groups for response in group.responses]
        entry = LedgerEntry(
            shard=f"w{self.writer:05d}_{ids[0]:08d}.arrow",
            groups=tuple(ids),
            responses=len(rewards),
            tokens=sum(len(response.tokens) for group in groups for response in group.responses),
            reward_sum=float(sum(rewards)),
            bytes=payload.size,
            sha256=hashlib.sha256(payload).hexdigest(),
            weights_hash=self.weights_hash,
            logprob_mode=self.logprob_mode,
        )
        with disk_errors(self.directory):
            self._write_shard(entry.shard, payload)
            self._write_line(to_line(entry))
        self._groups.update(ids)

    def _write_shard(self, name: str, payload: pa.Buffer) -> None:
        temporary = self.directory / f".{name}.tmp"
        try:
            with open(temporary, "wb") as file:
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.directory / name)
        except OSError:
            temporary.unlink(missing_ok=True)  # on a full disk its part counts
            raise
        fsync_path(self.directory)

    def _write_line(self, line: bytes) -> None:
        fd = self._ledger.fileno()
        try:
            written = 0
            while written < len(line):
                written += os.pwrite(fd, line[written:], self._length + written)
            os.fsync(fd)
        except BaseException:
            os.ftruncate(fd, self._length)  # so that a later append does not follow half a line
            raise
        self._length += len(line)

    def close(self) -> None:
        """Give up the number. The kernel does the same when the process dies."""
        self._ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RolloutStore:
    """What is present in one directory at this moment; sealed or still being written.

    ``entries`` are the ledger lines by first group id; ``group_ids`` the sorted ids present.
    Raises `UserError` for a damaged ledger.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise UserError(f"there are no rollouts in {self.directory}: run the rollout phase first")
        if is_sealed(self.directory):
            check_seal(self.directory)
        self.entries: tuple[LedgerEntry, ...] = tuple(read_ledgers(self.directory))
        check_one_policy(self.entries, self.directory)
        self._entry_of = {group: entry for entry in self.entries for group in entry.groups}
        self.group_ids: list[int] = sorted(self._entry_of)
        self._verified: set[str] = set()
        self._shard = functools.lru_cache(maxsize=OPEN_SHARDS)(self._open)

    def missing(self, expected: range) -> list[int]:
        return [group for group in expected if group not in self._entry_of]

    def read(self, group_ids: Sequence[int]) -> list[Group]:
        """The groups in the order asked for, as read-only views of the mapped shards.

        A shard's checksum is verified at its first use by this reader. Raises `UserError` for an absent group and
        for a shard whose bytes differ from its ledger line.
        """
        groups = []
        for group in group_ids:
            if group not in self._entry_of:
                raise UserError(f"group {group} is not in {self.directory}: it was never written or its shard was lost")
            groups.append(self._shard(self._entry_of[group]).group(group))
        return groups

    def _open(self, entry: LedgerEntry) -> _Shard:
        path = self.directory / entry.shard
        if entry.shard not in self._verified:
            verify_shard(path, entry)
            self._verified.add(entry.shard)
        return _Shard(path)


class _Shard:
    """One mapped shard; list columns as flat values and offsets, so that a group is a few slices."""

    def __init__(self, path: Path) -> None:
        with pa.memory_map(str(path)) as source:
            batch = pa.ipc.open_file(source).get_batch(0)
        self.prompts, self.tokens, self.logprobs = (
            (batch[name].offsets.to_numpy(), batch[name].values.to_numpy())
            for name in ("prompt_tokens", "response_tokens", "rollout_logprobs")
        )
        self.rewards = batch["reward"].to_numpy()
        self.versions = batch["policy_version"].to_numpy()
        self.finish_reasons = batch["finish_reason"].to_pylist()
        ids, first, count = np.unique(batch["group_id"].to_numpy(), return_index=True, return_counts=True)
        self.rows = {int(i): range(int(f), int(f + n)) for i, f, n in zip(ids, first, count, strict=True)}

    def group(self, group_id: int) -> Group:
        rows = self.rows[group_id]
        prompt = _slice(self.prompts, rows.start)
        return Group(group_id, prompt, tuple(self._response(row) for row in rows))

    def _response(self, row: int) -> Response:
        tokens, logprobs = _slice(self.tokens, row), _slice(self.logprobs, row)
        return Response(tokens, logprobs, float(self.rewards[row]), self.finish_reasons[row], int(self.versions[row]))


def seal(directory: Path, expected: range) -> None:
    """Freeze a directory that holds exactly the groups ``expected``: one ledger, then SEALED. Repeat it after a kill.

    Raises `UserError` when groups are missing or foreign, a shard's size is not its line's, or a writer is live.
    """
    directory = Path(directory)
    _check_complete(RolloutStore(directory), expected)
    if is_sealed(directory):
        return
    with contextlib.ExitStack() as locks:
        others = sorted(directory.glob("ledger.?????.jsonl"))
        for path in [directory / LEDGER, *others]:
            locks.enter_context(lock(path))
        store = RolloutStore(directory)
        _check_complete(store, expected)
        for entry in store.entries:
            check_size(directory / entry.shard, entry)
        _remove_orphans(directory, "*.arrow", store.entries)
        ledger = b"".join(to_line(entry) for entry in store.entries)
        write_atomic(directory / LEDGER, ledger)
        for path in others:
            path.unlink()
        fsync_path(directory)
        summary = {
            "groups": len(store.group_ids),
            "responses": sum(entry.responses for entry in store.entries),
            "tokens": sum(entry.tokens for entry in store.entries),
            "ledger_sha256": hashlib.sha256(ledger).hexdigest(),
            "weights_hash": store.entries[0].weights_hash if store.entries else None,
        }
        write_atomic(directory / SEALED, json.dumps(summary, indent=1) + "\n")


def _check_complete(store: RolloutStore, expected: range) -> None:
    missing = store.missing(expected)
    if missing:
        raise UserError(
            f"{store.directory} lacks {len(missing)} of {len(expected)} groups (the first is {missing[0]}): "
            "run the rollout phase again"
        )
    foreign = [group for group in store.group_ids if group not in expected]
    if foreign:
        raise UserError(
            f"{store.directory} has {len(foreign)} groups outside {expected}, the first is {foreign[0]}: "
            "another recipe wrote it"
        )


def _remove_orphans(directory: Path, pattern: str, entries: Sequence[LedgerEntry]) -> None:
    named = {entry.shard for entry in entries}
    for path in [*directory.glob(pattern), *directory.glob(f".{pattern}.tmp")]:
        if path.name not in named:
            path.unlink()


def _validate(groups: Sequence[Group]) -> None:
    for group in groups:
        where = f"group {group.group_id}"
        _check_tokens(group.prompt_tokens, f"{where}, prompt_tokens")
        if not group.responses:
            raise UserError(f"{where} has no responses")
        for index, response in enumerate(group.responses):
            here = f"{where}, response {index}"
            _check_tokens(response.tokens, f"{here}, tokens")
            logprobs = response.logprobs
            if logprobs.dtype != np.float32 or logprobs.shape != response.tokens.shape:
                raise UserError(
                    f"{here}: logprobs must be float32 [{len(response.tokens)}] like its tokens, "
                    f"got {logprobs.dtype} {list(logprobs.shape)}"
                )
            if not logprobs.max() <= LOGPROB_TOLERANCE or not np.isfinite(logprobs.min()):  # a NaN fails the first
                raise UserError(f"{here}: log-probs must be finite and <= 0, got {logprobs.min()} to {logprobs.max()}")
            if not np.isfinite(response.reward):
                raise UserError(f"{here}: the reward is {response.reward}, it must be finite")
            if response.finish_reason not in FINISH_REASONS:
                raise UserError(f"{here}: finish_reason is {response.finish_reason!r}, not one of {FINISH_REASONS}")


def _check_tokens(tokens: np.ndarray, where: str) -> None:
    if tokens.dtype != np.int32 or tokens.ndim != 1 or tokens.size == 0:
        raise UserError(f"{where}: at least one token as int32 [n] is needed, got {tokens.dtype} {list(tokens.shape)}")
    if tokens.min() < 0:
        raise UserError(f"{where}: token {tokens.min()} is negative")


def _encode(groups: Sequence[Group], weights_hash: str, logprob_mode: str) -> pa.Buffer:
    """One Arrow IPC file, uncompressed so that it can be mapped."""
    rows = [(group, sample, response) for group in groups for sample, response in enumerate(group.responses)]
    same = pa.array(np.zeros(len(rows), np.int8))
    columns = {
        "group_id": pa.array([group.group_id for group, _, _ in rows], pa.int64()),
        "sample": pa.array([sample for _, sample, _ in rows], pa.int32()),
        "prompt_tokens": _list_array([group.prompt_tokens for group, _, _ in rows]),
        "response_tokens": _list_array([response.tokens for _, _, response in rows]),
        "rollout_logprobs": _list_array([response.logprobs for _, _, response in rows]),
        "reward": pa.array([float(response.reward) for _, _, response in rows], pa.float64()),
        "finish_reason": pa.array([response.finish_reason for _, _, response in rows], pa.string()),
        "policy_version": pa.array([response.policy_version for _, _, response in rows], pa.int64()),
        "logprob_mode": pa.DictionaryArray.from_arrays(same, [logprob_mode]),
        "weights_hash": pa.DictionaryArray.from_arrays(same, [weights_hash]),
    }
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SCHEMA) as file:
        file.write_batch(pa.RecordBatch.from_pydict(columns, schema=SCHEMA))
    return sink.getvalue()


def _list_array(arrays: list[np.ndarray]) -> pa.ListArray:
    offsets = np.zeros(len(arrays) + 1, np.int32)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    return pa.ListArray.from_arrays(offsets, np.concatenate(arrays))


def _slice(column: tuple[np.ndarray, np.ndarray], row: int) -> np.ndarray:
    offsets, values = column
    return values[offsets[row] : offsets[row + 1]]
