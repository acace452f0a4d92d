"""The ledger of a rollout store: one checksummed line a shard, and the checks that the files agree with it."""

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
from megarl.storage.checked_json import decode, encode
from megarl.storage.files import file_sha256
from megarl.storage.json_lines import split_lines

LEDGER = "ledger.jsonl"  # of writer 0; of all writers once sealed
SEALED = "SEALED"


@dataclass(frozen=True)
class LedgerEntry:
    """One ledger line: a shard and what is in it. ``tokens`` are response tokens, ``bytes`` is the size of its file."""

    shard: str
    groups: tuple[int, ...]
    responses: int
    tokens: int
    reward_sum: float
    bytes: int
    sha256: str
    weights_hash: str
    logprob_mode: str


def to_line(entry: LedgerEntry) -> bytes:
    """One line of JSON that ends with a checksum."""
    return encode(asdict(entry))


def from_line(line: bytes) -> LedgerEntry | None:
    """The entry, or None where the line does not agree with its own checksum."""
    try:
        fields = decode(line, needs_checksum=True)
    except (ValueError, RecursionError):
        return None
    return LedgerEntry(**{**fields, "groups": tuple(fields["groups"])})


def is_sealed(directory: Path) -> bool:
    """Whether the rollouts in a directory are complete and closed to writers."""
    return (Path(directory) / SEALED).exists()


def lock(path: Path) -> FileIO:
    """Open a ledger for its single writer; the lock ends when the file is closed or the process dies.

    Raises `UserError` when a live process holds the lock.
    """
    # flock belongs to the open file: a POSIX record lock would be lost when this process closes a reader of the ledger.
    file = FileIO(path, "r+", opener=lambda name, flags: os.open(name, flags | os.O_CREAT, 0o644))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_ino != os.stat(path).st_ino:
            raise BlockingIOError  # sealing replaced the file between open and lock
    except (BlockingIOError, FileNotFoundError) as error:
        file.close()
        raise UserError(f"another process is writing {path}: wait for it to end, or stop it") from error
    return file


def parse(path: Path) -> tuple[list[LedgerEntry], int]:
    """Entries of one ledger and the bytes of its intact part: a line torn by a crash at the very end is left out."""
    return _parse(path.read_bytes(), path, 1)


def _parse(data: bytes, path: Path, first: int) -> tuple[list[LedgerEntry], int]:
    """`parse` of a part of ``path`` that begins with line ``first``."""
    lines, torn = split_lines(data)
    entries, length = [], 0
    for number, line in enumerate(lines, first):
        entry = from_line(line)
        if entry is None:
            if number == first + len(lines) - 1 and not torn:
                break
            raise UserError(
                f"line {number} of {path} is damaged: its checksum does not match. Restore the file from a copy, or "
                "delete that line and start again: only its groups are generated anew"
            )
        entries.append(entry)
        length += len(line) + 1
    return entries, length


class Ledgers:
    """The entries of all ledgers of a directory, of which each line is read once, however often it is looked at."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[str, tuple[int, int, int]] = {}  # file -> inode, bytes and lines that are read
        self._by_shard: dict[str, LedgerEntry] = {}
        self._owner: dict[int, str] = {}

    def read(self) -> list[LedgerEntry]:
        """What was appended since the last call; `UserError` for damage and contradictions."""
        new = []
        others = sorted(self._directory.glob("ledger.?????.jsonl"))
        # Sealing moves the other writers' lines into LEDGER and then removes their files: LEDGER, the last, has all.
        for path in [*others, self._directory / LEDGER]:
            with contextlib.suppress(FileNotFoundError):
                new += [entry for entry in self._appended(path) if self._add(entry)]
        return new

    @property
    def entries(self) -> list[LedgerEntry]:
        """All that are read, by first group id."""
        return sorted(self._by_shard.values(), key=lambda entry: entry.groups[0])

    def _appended(self, path: Path) -> list[LedgerEntry]:
        inode, size, lines = self._read.get(path.name, (-1, 0, 0))
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != inode or status.st_size < size:  # replaced by sealing
                size = lines = 0
            file.seek(size)
            entries, length = _parse(file.read(), path, lines + 1)
        self._read[path.name] = status.st_ino, size + length, lines + len(entries)
        return entries

    def _add(self, entry: LedgerEntry) -> bool:
        """False for the same line in a second ledger, as a killed sealing leaves it."""
        known = self._by_shard.setdefault(entry.shard, entry)
        if known != entry:
            raise UserError(
                f"two ledgers in {self._directory} disagree about {entry.shard}: "
                "delete one of its lines and start again"
            )
        for group in entry.groups:
            if self._owner.setdefault(group, entry.shard) != entry.shard:
                raise UserError(
                    f"group {group} in {self._directory} is both in {self._owner[group]} and in {entry.shard}: "
                    "delete one of the two lines from its ledger and start again"
                )
        return known is entry


def ledger_sizes(directory: Path) -> dict[str, int]:
    """{name: bytes} of every ledger, which changes whenever something is appended."""
    sizes = {}
    for path in directory.glob("ledger*.jsonl"):
        with contextlib.suppress(FileNotFoundError):  # sealing removes the other writers'
            sizes[path.name] = path.stat().st_size
    return sizes


def check_one_policy(entries: Sequence[LedgerEntry], directory: Path, weights_hash: str | None = None) -> None:
    """`UserError` unless all entries were sampled from one policy: ``weights_hash``, or else the first entry's."""
    for entry in entries:
        weights_hash = weights_hash or entry.weights_hash
        if entry.weights_hash != weights_hash:
            raise _other_policy(directory / entry.shard, "weights", entry.weights_hash, weights_hash)


def check_one_mode(entries: Sequence[LedgerEntry], directory: Path, logprob_mode: str | None = None) -> None:
    """The same for the kind of log-probs."""
    for entry in entries:
        logprob_mode = logprob_mode or entry.logprob_mode
        if entry.logprob_mode != logprob_mode:
            raise _other_policy(directory / entry.shard, "log-prob mode", entry.logprob_mode, logprob_mode)


def _other_policy(shard: Path, what: str, theirs: str, ours: str) -> UserError:
    return UserError(
        f"{shard} was sampled with {what} {theirs!r}, not {ours!r}: a stage has one behaviour policy. "
        f"Put the first policy back, or delete {shard.parent} to generate the stage again"
    )


def check_seal(directory: Path) -> None:
    """`UserError` unless the ledger of a sealed directory is the one that was sealed."""
    seal, ledger = directory / SEALED, directory / LEDGER
    try:
        expected = decode(seal.read_bytes())["ledger_sha256"]
    except (ValueError, KeyError, RecursionError, OSError) as error:
        raise UserError(
            f"{seal} is damaged: {error}. Restore it from a copy, or delete it and start again: the stage's rollouts "
            "are then sealed anew"
        ) from error
    try:
        intact = hashlib.sha256(ledger.read_bytes()).hexdigest() == expected
    except (FileNotFoundError, IsADirectoryError):
        intact = False
    if not intact:
        raise UserError(
            f"{ledger} does not agree with {seal}: it was truncated or edited after sealing. Restore it from a copy, "
            f"or delete {directory} to generate the stage again"
        )


def sealed_groups(directory: Path, which: str) -> list[int] | None:
    """The "chosen" groups of a sealed stage, which it trains, or those that are "carried" into the next one.

    None where the seal names none of the kind, and where there is no seal: all are trained, or none carried.
    """
    path = directory / SEALED
    return decode(path.read_bytes()).get(which) if path.exists() else None


def sealed_external(directory: Path) -> bool:
    """Whether a sealed stage was filled from outside: with prompts and rewards that the recipe does not know."""
    path = directory / SEALED
    return path.exists() and decode(path.read_bytes()).get("external") is True


def check_size(path: Path, entry: LedgerEntry) -> None:
    """`UserError` unless the shard is there with the size in its entry."""
    if not path.exists() or path.stat().st_size != entry.bytes:
        raise _damaged(path, f"has {path.stat().st_size} bytes, not {entry.bytes}" if path.exists() else "is gone")


def verify_shard(path: Path, entry: LedgerEntry) -> None:
    """`UserError` unless the shard has the content in its entry; reads all of it."""
    check_size(path, entry)
    if file_sha256(path) != entry.sha256:
        raise _damaged(path, "does not match the checksum in its ledger")


def _damaged(path: Path, what: str) -> UserError:
    seal_file = f"{SEALED}, " if is_sealed(path.parent) else ""
    return UserError(
        f"the shard {path} {what}. Restore it from a copy, or delete {seal_file}the shard and its line in the ledger "
        "and start again: only its groups are generated anew"
    )
