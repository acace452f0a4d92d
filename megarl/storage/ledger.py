"""The ledger of a rollout store: one checksummed line per shard, and the checks that the files agree with it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path

from megarl.errors import UserError
from megarl.storage.checked_json import Record, encode, parse_lines, read_checked
from megarl.storage.files import file_sha256

LEDGER = "ledger.jsonl"  # the lines of writer 0; after sealing those of all writers
SEALED = "SEALED"


@dataclass(frozen=True)
class LedgerEntry:
    """One ledger line: a shard and its contents."""

    shard: str  # file name
    groups: tuple[int, ...]  # ids, sorted
    responses: int
    tokens: int  # of the responses
    reward_sum: float
    bytes: int  # size of the file
    sha256: str  # of the file
    weights_hash: str  # of the policy that sampled the responses
    logprob_mode: str  # which distribution the stored log-probs belong to, as the engine names it


def to_line(entry: LedgerEntry) -> bytes:
    """Encode an entry as one line of JSON with a checksum."""
    return encode(asdict(entry))


def is_sealed(directory: Path) -> bool:
    """Whether the rollouts in a directory are complete and closed to writers."""
    return (Path(directory) / SEALED).exists()


def lock(path: Path) -> FileIO:
    """Open a ledger for its single writer; the lock ends when the file is closed or the process dies.

    Raises `UserError` when a live process holds the lock.
    """
    # flock belongs to the open file; a POSIX lock would be lost as soon as this process closes any reader of the ledger
    file = FileIO(path, "r+", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o644))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_ino != os.stat(path).st_ino:
            raise BlockingIOError  # sealing replaced the file after it was opened
    except (BlockingIOError, FileNotFoundError) as error:
        file.close()
        raise UserError(f"another process is writing {path}: wait until it ends, or stop it") from error
    return file


def parse(path: Path, data: bytes | None = None, first: int = 1) -> tuple[list[LedgerEntry], int]:
    """(entries of a ledger, bytes of the intact part). A last line that a crash has torn is left out.

    data: the part of the ledger that begins with line number ``first``; by default all of it.
    `UserError` for any other damaged line.
    """
    *lines, torn = (path.read_bytes() if data is None else data).split(b"\n")
    try:
        records = parse_lines(lines, path, first, needs_checksum=True)
    except UserError:
        if torn:
            raise
        lines.pop()  # a crash may have torn it too; if another line is damaged, the same error follows
        records = parse_lines(lines, path, first, needs_checksum=True)
    entries = [LedgerEntry(**record | {"groups": tuple(record["groups"])}) for record in records]
    return entries, sum(len(line) + 1 for line in lines)


class Ledgers:
    """The entries of all ledgers of a directory. Each line is read only once, however often `read` is called."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[str, tuple[int, int, int]] = {}  # file -> (inode, bytes read, lines read)
        self._by_shard: dict[str, LedgerEntry] = {}
        self.by_group: dict[int, LedgerEntry] = {}  # of all entries read so far

    def read(self) -> list[LedgerEntry]:
        """The entries appended since the last call; `UserError` for damage and contradictions."""
        new = []
        others = sorted(self._directory.glob("ledger.?????.jsonl"))
        # sealing copies the other writers' lines to LEDGER, then removes their files: LEDGER, read last, misses none
        for path in [*others, self._directory / LEDGER]:
            with contextlib.suppress(FileNotFoundError):
                new += [entry for entry in self._appended(path) if self._add(entry)]
        return new

    @property
    def entries(self) -> list[LedgerEntry]:
        """All entries read so far, sorted by their first group id."""
        return sorted(self._by_shard.values(), key=lambda entry: entry.groups[0])

    def _appended(self, path: Path) -> list[LedgerEntry]:
        inode, size, lines = self._read.get(path.name, (-1, 0, 0))
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != inode or status.st_size < size:  # replaced by sealing
                size = lines = 0
            file.seek(size)
            entries, length = parse(path, file.read(), lines + 1)
        self._read[path.name] = status.st_ino, size + length, lines + len(entries)
        return entries

    def _add(self, entry: LedgerEntry) -> bool:
        """Whether the entry is new: after a sealing that was killed, the same line may be in two ledgers."""
        known = self._by_shard.setdefault(entry.shard, entry)
        for group in entry.groups:
            if (owner := self.by_group.setdefault(group, entry).shard) != entry.shard:
                raise UserError(
                    f"group {group} in {self._directory} is both in {owner} and in {entry.shard}: "
                    "delete the line of one of these shards from its ledger and start again"
                )
        return known is entry


def check_equal(entries: Sequence[LedgerEntry], directory: Path, field: str, expected: str) -> None:
    """`UserError` unless ``field`` of all entries ("weights_hash" or "logprob_mode") has the value ``expected``."""
    for entry in entries:
        if (found := getattr(entry, field)) != expected:
            what = {"weights_hash": "weights", "logprob_mode": "log-prob mode"}[field]
            raise UserError(
                f"{directory / entry.shard} was sampled with {what} {found!r}, not {expected!r}: a stage has one "
                f"behaviour policy. Put the first policy back, or delete {directory} to generate the stage again"
            )


def check_seal(directory: Path) -> None:
    """`UserError` unless the ledger of a sealed directory has the checksum in its seal."""
    seal, ledger = directory / SEALED, directory / LEDGER
    expected = _read_seal(directory).get("ledger_sha256")
    try:
        intact = hashlib.sha256(ledger.read_bytes()).hexdigest() == expected
    except (FileNotFoundError, IsADirectoryError):
        intact = False
    if not intact:
        raise UserError(
            f"{ledger} does not agree with {seal}: it was truncated or edited after sealing. Restore it from a copy, "
            f"or delete {directory} to generate the stage again"
        )


def _read_seal(directory: Path) -> Record:
    """What `SEALED` says; {} if there is none."""
    remedy = "Restore it from a copy, or delete it and start again: the stage's rollouts are then sealed again"
    return read_checked(directory / SEALED, remedy) if is_sealed(directory) else {}


def sealed_groups(directory: Path, which: str) -> list[int] | None:
    """The ids in the seal of a stage: ``which`` is "chosen" for the groups it trains, "carried" for those it passes on.

    None if there is no seal or it has no such list: then all groups are trained, and none is carried.
    """
    return _read_seal(directory).get(which)


def sealed_external(directory: Path) -> bool:
    """Whether a sealed stage was filled from outside, with prompts and rewards that the recipe does not know."""
    return _read_seal(directory).get("external") is True


def check_size(path: Path, entry: LedgerEntry) -> None:
    """`UserError` unless the shard exists and has the size in its entry."""
    if not path.exists() or path.stat().st_size != entry.bytes:
        raise _damaged(path, f"has {path.stat().st_size} bytes, not {entry.bytes}" if path.exists() else "is gone")


def verify_shard(path: Path, entry: LedgerEntry) -> None:
    """`UserError` unless the shard has the size and checksum in its entry; reads the whole file."""
    check_size(path, entry)
    if file_sha256(path) != entry.sha256:
        raise _damaged(path, "does not match the checksum in its ledger")


def _damaged(path: Path, what: str) -> UserError:
    seal_file = f"{SEALED}, " if is_sealed(path.parent) else ""
    return UserError(
        f"the shard {path} {what}. Restore it from a copy, or delete {seal_file}the shard and its line in the ledger "
        "and start again: only its groups are generated again"
    )
