"""JSON objects that contain their own checksum, so that damage is detected when they are read; alone or one per line.

Files of lines grow while others read them. A killed writer may leave half a line at the end: readers ignore it, and the
next writer removes it. Any other line that cannot be read is damage: `read_json_lines` and a strict
`JsonTail` raise, the others skip the line.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.storage.files import disk_errors, fsync_path, read_errors, write_atomic

Record = dict[str, Any]


def encode(record: Record, indent: int | None = None) -> bytes:
    """JSON, on one line or indented, whose last field ``crc`` is the CRC-32 of all bytes before it."""
    gap, end = (b" ", b"}") if indent is None else (b"\n" + b" " * indent, b"\n}")
    body = json.dumps(record, indent=indent).encode().removesuffix(end)
    return body + b',%s"crc": "%08x"%s\n' % (gap, zlib.crc32(body), end)


def decode(data: bytes, needs_checksum: bool = True) -> Record:
    """The object without its checksum; ValueError if it is wrong, or missing although ``needs_checksum``."""
    record = json.loads(data)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if record.pop("crc", None) is None:
        if needs_checksum:
            raise ValueError("it has no checksum")
    elif encode(record, 1 if data[1:2] == b"\n" else None) != data.rstrip(b"\n") + b"\n":  # notices white space too
        raise ValueError("it does not match its checksum")
    return record


def write_checked(path: Path, record: Record) -> None:
    """Atomically replace the file ``path`` by ``record`` with its checksum."""
    write_atomic(path, encode(record, indent=1))


def read_checked(path: Path, remedy: str = "") -> Record:
    """Read what `write_checked` wrote; `UserError`, ending with ``remedy``, if the file is damaged or missing."""
    try:
        with read_errors(path):
            return decode(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}" + (remedy and f". {remedy}")) from error


def append_json(path: Path, record: Record) -> None:
    """Append one line with a checksum, without syncing it. Processes of several nodes may append to the same file."""
    append_line(path, encode(record))


def append_line(path: Path, line: bytes) -> None:
    """Append a line that is encoded already and ends with a newline; like `append_json`."""
    created = not path.exists()
    with disk_errors(path), open(path, "ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ranks of several nodes append, and not every file system does so atomically
        if created:
            fsync_path(path.parent)
        if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line)


def read_json_lines(path: Path, needs_checksum: bool = False) -> list[Record]:
    """All objects of a file; `UserError` with the line's number if one is damaged. A torn last line is left out.

    needs_checksum: every line must have its checksum, and a torn last line is damage too.
    """
    *lines, torn = path.read_bytes().split(b"\n")
    return parse_lines([*lines, torn] if needs_checksum and torn else lines, path, 1, needs_checksum)


def parse_lines(lines: list[bytes], path: Path, first: int, needs_checksum: bool = False) -> list[Record]:
    """Decode lines of ``path``, the first of which is line number ``first``; `UserError` for a damaged one."""
    records = []
    for number, line in enumerate(lines, first):
        try:
            records.append(decode(line, needs_checksum=needs_checksum))
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{path}, line {number} is damaged: {error}. Restore the file from a copy, or delete that line"
            ) from error
    return records


def read_intact_lines(path: Path) -> tuple[list[Record], int]:
    """(the readable objects of a file that may be damaged, number of unreadable lines, a torn last one included)."""
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    records = [record for line in lines if (record := _object_or_none(line)) is not None]
    return records, len(lines) - len(records)


class JsonTail:
    """Follows a file that grows, like ``tail -f``: it may also be truncated, or missing.

    strict: a damaged line is a `UserError`; otherwise such lines are skipped.
    """

    def __init__(self, path: Path, strict: bool = False) -> None:
        self.path, self._offset, self._strict = path, 0, strict
        self._lines = 0  # number of lines before the offset

    def read(self) -> tuple[bool, list[Record]]:
        """(whether the file was truncated, the objects appended since the last call); after a truncation all objects.

        `UserError` for a directory in the place of the file.
        """
        try:
            size = os.stat(self.path).st_size
            if size == self._offset:
                return False, []
            truncated = size < self._offset
            if truncated:
                self._offset = self._lines = 0
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return False, []
        except IsADirectoryError as error:
            raise UserError(f"{self.path} is a directory: move it away, then start again") from error
        *lines, torn = data.split(b"\n")
        first, self._lines = self._lines + 1, self._lines + len(lines)
        self._offset += len(data) - len(torn)
        if self._strict:
            return truncated, parse_lines(lines, self.path, first)
        return truncated, [record for line in lines if (record := _object_or_none(line)) is not None]


def _object_or_none(line: bytes) -> Record | None:
    try:
        return decode(line, needs_checksum=False)
    except (ValueError, RecursionError):
        return None
