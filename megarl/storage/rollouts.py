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
    check_one_mode,
    check_one_policy,
    check_seal,
    check_size,
    is_sealed,
    ledger_sizes,
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

SERVED = "served.jsonl"  # beside the shards: which group of agents has which number
OPEN_SHARDS = 16  # shards a reader keeps mapped: its memory must not grow with the stage


class RolloutWriter:
    """Appends groups to one directory. Several writers may share it, each with a number and so with files of its own.

    weights_hash: of the stage's policy; None where a stage has several, and each `append` says which.
    logprob_mode: of which distribution the stored log-probs are, as the engine names it.
    external: for groups that agents fill, which are not mixed with generated ones.
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
            raise UserError(f"{directory} has groups that agents filled: go on with megarl serve, or delete it")
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
        everything = Ledgers(self.directory).read()
        if self.weights_hash is not None:
            check_one_policy(everything, self.directory, self.weights_hash)
        check_one_mode(everything, self.directory, self.logprob_mode)
        self._groups = {group for entry in everything for group in entry.groups}
        _remove_orphans(self.directory, f"w{self.writer:05d}_*.arrow", everything)

    def append(self, groups: Sequence[Group], weights_hash: str | None = None) -> None:
        """Write ``groups`` as one shard and one ledger line: durable on return, none of them present on an error.

        weights_hash: of the policy that finished them, where the stage has several.
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
        """Release the number, as the kernel does when the process dies."""
        self._ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RolloutStore:
    """The groups of one directory, sealed or still being written, as of the last `refresh`.

    ``group_ids`` are the sorted ids that are present, ``chosen`` those of them that are trained.
    Raises `UserError` for a damaged ledger, and for groups of several policies where ``one_policy`` is asked for.
    """

    def __init__(self, directory: Path, *, one_policy: bool = True) -> None:
        self.directory, self.one_policy = Path(directory), one_policy
        if not self.directory.is_dir():
            raise UserError(f"there are no rollouts in {self.directory}: run the rollout phase first")
        if is_sealed(self.directory):
            check_seal(self.directory)
        self._sealed_choice = sealed_groups(self.directory, "chosen")
        self._verified: set[str] = set()
        self._ledgers = Ledgers(self.directory)
        self._entry_of: dict[int, LedgerEntry] = {}
        self._first: LedgerEntry | None = None
        self._shard = functools.lru_cache(maxsize=OPEN_SHARDS)(self._open)
        self._sizes: dict[str, int] | None = None
        self.refresh()

    def refresh(self) -> None:
        """Read which groups have been stored since."""
        sizes = ledger_sizes(self.directory)
        if sizes == self._sizes:
            return
        self._sizes = sizes  # taken before reading, so that what is appended meanwhile is read next time
        new = self._ledgers.read()
        self._first = first = self._first or next(iter(new), None)
        if first and self.one_policy:
            check_one_policy(new, self.directory, first.weights_hash)
        if first:
            check_one_mode(new, self.directory, first.logprob_mode)
        self._entry_of |= {group: entry for entry in new for group in entry.groups}
        self.group_ids: list[int] = sorted(self._entry_of)

    @property
    def entries(self) -> list[LedgerEntry]:
        """The ledger lines, by first group id."""
        return self._ledgers.entries

    @property
    def chosen(self) -> Sequence[int]:
        """The ids of the groups to train, sorted: all that are present, unless `seal` was given a choice."""
        return self.group_ids if self._sealed_choice is None else self._sealed_choice

    @property
    def external(self) -> bool:
        """Whether prompts and rewards came from outside: `seal`."""
        return sealed_external(self.directory)

    def missing(self, expected: Sequence[int]) -> list[int]:
        """Those of ``expected`` that are not present."""
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

    def verify(self, entry: LedgerEntry) -> None:
        """`UserError` for a shard whose bytes differ from its ledger line; reads all of it, once."""
        if entry.shard not in self._verified:
            verify_shard(self.directory / entry.shard, entry)
            self._verified.add(entry.shard)

    def _open(self, entry: LedgerEntry) -> Shard:
        self.verify(entry)
        return Shard(self.directory / entry.shard)


def seal(
    directory: Path,
    expected: Sequence[int],
    chosen: Sequence[int] | None = None,
    carried: Sequence[int] | None = None,
    *,
    one_policy: bool = True,
    external: bool = False,
) -> None:
    """Freeze a directory that holds exactly the groups ``expected``: one ledger, then SEALED. Repeat it after a kill.

    chosen: the groups to train, which alone must be present; other groups of ``expected`` that are present are kept.
    carried: those that are candidates of the next stage again.
    external: prompts and rewards are somebody else's, not those of the recipe's data and verifier.
    Raises `UserError` when groups are missing or foreign, a shard has not the size in its ledger line, or a writer is
    live.
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
            "another recipe wrote it"
        )


def _remove_orphans(directory: Path, pattern: str, entries: Sequence[LedgerEntry]) -> None:
    named = {entry.shard for entry in entries}
    for path in [*directory.glob(pattern), *directory.glob(f".{pattern}.tmp")]:
        if path.name not in named:
            path.unlink()
