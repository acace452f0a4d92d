"""The rollout store: memory-mapped Arrow shards and a checksummed ledger that says which shards are valid.

A group (all responses to a prompt) is either stored completely or not at all. A shard is synced and renamed into place,
then one synced ledger line names it; that line commits its groups. After a kill at any point, the next writer removes
shards that no intact line names, and the phase generates only the missing groups again. `seal` freezes the stage.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import pyarrow as pa

from megarl.errors import UserError
from megarl.storage.checked_json import write_checked
from megarl.storage.files import disk_errors, fsync_path, write_atomic
from megarl.storage.ledger import (
    LEDGER,
    SEALED,
    LedgerEntry,
    Ledgers,
    check_equal,
    check_seal,
    check_size,
    is_sealed,
    lock,
    parse,
    sealed_external,
    sealed_groups,
    to_line,
    verify_shard,
)
from megarl.storage.shards import Group as Group
from megarl.storage.shards import Response as Response
from megarl.storage.shards import Shard, encode, validate

SERVED = "served.jsonl"  # in stages that agents fill: which group id each of the agents' groups has
OPEN_SHARDS = 16  # shards that a reader keeps mapped, so that its memory does not grow with the stage


class RolloutWriter:
    """Appends groups to one directory, which several writers may share.

    weights_hash: of the stage's policy; None if several policies generate the stage: then each `append` names one.
    logprob_mode: which distribution the stored log-probs belong to, as the engine names it.
    writer: a number that no other live writer of the directory has; shards and ledger are named after it.
    external: allow to continue a stage that agents fill; their groups are never mixed with generated ones.
    Raises `UserError` for a sealed stage, a number that a live process uses, groups of another policy
    (``weights_hash``), damage in the ledger, and a full disk.
    """

    def __init__(
        self,
        directory: Path,
        *,
        weights_hash: str | None,
        logprob_mode: str,
        writer: int = 0,
        external: bool = False,
    ) -> None:
        self.directory, self.writer = Path(directory), writer
        if (self.directory / SERVED).exists() and not external:
            raise UserError(f"{directory} has groups that agents filled: continue with `megarl serve`, or delete it")
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
            raise UserError(f"{self.directory} is sealed: no rollouts can be added to a sealed stage")

    def _recover(self) -> None:
        self._refuse_sealed()  # again: it may have been sealed before this writer got its lock
        _, self._length = parse(Path(self._ledger.name))
        os.ftruncate(self._ledger.fileno(), self._length)
        os.fsync(self._ledger.fileno())
        fsync_path(self.directory)
        everything = Ledgers(self.directory).read()
        if self.weights_hash is not None:
            check_equal(everything, self.directory, "weights_hash", self.weights_hash)
        check_equal(everything, self.directory, "logprob_mode", self.logprob_mode)
        self._groups = {group for entry in everything for group in entry.groups}
        _remove_orphans(self.directory, f"w{self.writer:05d}_*.arrow", everything)

    def append(self, groups: Sequence[Group], weights_hash: str | None = None) -> None:
        """Write ``groups`` as one shard and one ledger line: durable on return, and none of them stored after an error.

        weights_hash: of the policy that finished the groups, if several policies generate the stage.
        """
        if not groups:
            return
        weights_hash = self.weights_hash or weights_hash
        assert weights_hash is not None
        groups = sorted(groups, key=lambda group: group.group_id)
        ids = [group.group_id for group in groups]
        validate(groups)
        repeated = sorted(self._groups.intersection(ids)) + [a for a, b in itertools.pairwise(ids) if a == b]
        if repeated:
            raise UserError(f"group {repeated[0]} is already in {self.directory}: a group is written once")
        payload = encode(groups, weights_hash, self.logprob_mode)
        rewards = [response.reward for group in groups for response in group.responses]
        entry = LedgerEntry(
            shard=f"w{self.writer:05d}_{ids[0]:08d}.arrow",
            groups=tuple(ids),
            responses=len(rewards),
            tokens=sum(len(response.tokens) for group in groups for response in group.responses),
            reward_sum=float(sum(rewards)),
            bytes=payload.size,
            sha256=hashlib.sha256(payload).hexdigest(),
            weights_hash=weights_hash,
            logprob_mode=self.logprob_mode,
        )
        with disk_errors(self.directory):
            self._write_shard(entry.shard, payload)
            self._write_line(to_line(entry))
        self._groups.update(ids)

    def _write_shard(self, name: str, payload: pa.Buffer) -> None:
        write_atomic(self.directory / name, memoryview(payload))

    def _write_line(self, line: bytes) -> None:
        fd = self._ledger.fileno()
        try:
            written = 0
            while written < len(line):
                written += os.pwrite(fd, line[written:], self._length + written)
            os.fsync(fd)
        except BaseException:
            os.ftruncate(fd, self._length)  # removes half a line, so that a later append begins a new one
            raise
        self._length += len(line)

    def close(self) -> None:
        """Release the writer's number; the kernel does so too when the process dies."""
        self._ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RolloutStore:
    """Reads the groups of one directory, sealed or still being written, as of the last `refresh`.

    ``group_ids`` are the sorted ids of the stored groups, ``chosen`` those of the groups to train.
    one_policy: refuse groups of several policies, with `UserError`. A damaged ledger is a `UserError` too.
    """

    def __init__(self, directory: Path, *, one_policy: bool = True) -> None:
        self.directory, self.one_policy = Path(directory), one_policy
        if not self.directory.is_dir():
            raise UserError(f"{self.directory} does not exist: run the rollout phase first")
        if is_sealed(self.directory):
            check_seal(self.directory)
        self._sealed_choice = sealed_groups(self.directory, "chosen")
        self._verified: set[str] = set()
        self._ledgers = Ledgers(self.directory)
        self._shard = functools.lru_cache(maxsize=OPEN_SHARDS)(self._open)
        self.group_ids: list[int] = []
        self.refresh()

    def refresh(self) -> None:
        """Read which groups have been stored since the last call."""
        if not (new := self._ledgers.read()):
            return
        first = next(iter(self._ledgers.by_group.values()))
        if self.one_policy:
            check_equal(new, self.directory, "weights_hash", first.weights_hash)
        check_equal(new, self.directory, "logprob_mode", first.logprob_mode)
        self.group_ids = sorted(self._ledgers.by_group)

    @property
    def entries(self) -> list[LedgerEntry]:
        """The ledger lines, sorted by their first group id."""
        return self._ledgers.entries

    @property
    def chosen(self) -> Sequence[int]:
        """The sorted ids of the groups to train: all stored groups, unless `seal` was given a choice."""
        return self.group_ids if self._sealed_choice is None else self._sealed_choice

    @property
    def external(self) -> bool:
        """Whether prompts and rewards came from outside: see `seal`."""
        return sealed_external(self.directory)

    def missing(self, expected: Sequence[int]) -> list[int]:
        """The group ids in ``expected`` that are not stored."""
        return [group for group in expected if group not in self._ledgers.by_group]

    def read(self, group_ids: Sequence[int]) -> list[Group]:
        """The groups, in the order of ``group_ids``, as read-only views of the mapped shards.

        A shard's checksum is verified when this reader uses it for the first time. Raises `UserError` for a group that
        is not stored, and for a shard that does not match its ledger line.
        """
        groups = []
        for group in group_ids:
            if group not in self._ledgers.by_group:
                raise UserError(f"group {group} is not in {self.directory}: it was never written or its shard was lost")
            groups.append(self._shard(self._ledgers.by_group[group]).group(group))
        return groups

    def verify(self, entry: LedgerEntry) -> None:
        """`UserError` if a shard does not match its ledger line; reads the whole file, but only once per shard."""
        if entry.shard not in self._verified:
            verify_shard(self.directory / entry.shard, entry)
            self._verified.add(entry.shard)

    def _open(self, entry: LedgerEntry) -> Shard:
        self.verify(entry)
        return Shard.open(self.directory / entry.shard)


def seal(
    directory: Path,
    expected: Sequence[int],
    chosen: Sequence[int] | None = None,
    carried: Sequence[int] | None = None,
    *,
    one_policy: bool = True,
    external: bool = False,
) -> None:
    """Freeze a directory that holds exactly the groups ``expected``: merge the ledgers into one, then write SEALED.

    It can be repeated after a kill.
    chosen: the groups to train; if given, only these must be stored, and other groups of ``expected`` may be.
    carried: the groups that are left to the next stage, as candidates.
    external: whether prompts and rewards came from outside instead of from the recipe's data and verifier.
    Raises `UserError` if groups are missing or unexpected, a shard has another size than its ledger line says, or a
    writer is still open.
    """
    directory = Path(directory)
    needed = expected if chosen is None else chosen
    _check_complete(RolloutStore(directory, one_policy=one_policy), needed, expected)
    if is_sealed(directory):
        return
    with contextlib.ExitStack() as locks:
        others = sorted(directory.glob("ledger.?????.jsonl"))
        for path in [directory / LEDGER, *others]:
            locks.enter_context(lock(path))
        store = RolloutStore(directory, one_policy=one_policy)
        _check_complete(store, needed, expected)
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
            "weights_hash": store.entries[0].weights_hash if store.entries and one_policy else None,
        }
        summary |= {name: list(ids) for name, ids in (("chosen", chosen), ("carried", carried)) if ids is not None}
        if external:
            summary["external"] = True
        write_checked(directory / SEALED, summary)


def _check_complete(store: RolloutStore, needed: Sequence[int], expected: Sequence[int]) -> None:
    missing = store.missing(needed)
    if missing:
        raise UserError(
            f"{store.directory} lacks {len(missing)} of {len(needed)} groups (the first is {missing[0]}): "
            "run the rollout phase again"
        )
    known = expected if isinstance(expected, range) else frozenset(expected)
    foreign = [group for group in store.group_ids if group not in known]
    if foreign:
        what = expected if isinstance(expected, range) else f"the {len(expected)} candidates of the stage"
        raise UserError(
            f"{store.directory} has {len(foreign)} groups outside {what}, the first is {foreign[0]}: "
            "it was written with another recipe"
        )


def _remove_orphans(directory: Path, pattern: str, entries: Sequence[LedgerEntry]) -> None:
    named = {entry.shard for entry in entries}
    for path in [*directory.glob(pattern), *directory.glob(f".{pattern}.tmp")]:
        if path.name not in named:
            path.unlink()
