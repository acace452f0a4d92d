"""Files of JSON objects, one per line, that grow while others read them. A line's checksum is verified and removed.

A killed writer may leave half a line at the end: readers ignore it, and the next writer removes it. Any other line that
cannot be read is damage: `read_json_lines` and `StrictTail` raise, `read_intact_lines` and `JsonTail` skip the line.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from megarl.errors import UserError
from megarl.storage.checked_json import Record as Record
from megarl.storage.checked_json import decode, encode
from megarl.storage.files import disk_errors, fsync_path


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
        end = file.seek(0, os.SEEK_END)
        if end and _last_byte(file, end) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line)


def read_json_lines(path: Path) -> list[Record]:
    """All objects of a file; `UserError` with the line's number if one is damaged."""
    return parse_lines(split_lines(path.read_bytes())[0], path)


def parse_lines(lines: list[bytes], path: Path, first: int = 1) -> list[Record]:
    """Decode complete lines of ``path``, the first of which is line number ``first``; `UserError` for a damaged one."""
    records = []
    for number, line in enumerate(lines, first):
        try:
            records.append(decode(line))
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


def split_lines(data: bytes) -> tuple[list[bytes], bytes]:
    """(the complete lines of ``data`` without their newlines, the torn rest after the last newline)."""
    *lines, torn = data.split(b"\n")
    return lines, torn


class StrictTail:
    """Follows a file that only grows, like ``tail -f``; a damaged line is a `UserError`."""

    def __init__(self, path: Path) -> None:
        self.path, self._offset, self._lines = path, 0, 0

    def read(self) -> list[Record]:
        """The objects appended since the last call."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                lines = split_lines(file.read())[0]
        except FileNotFoundError:
            return []
        except IsADirectoryError as error:
            raise UserError(f"{self.path} is a directory: move it away, then start again") from error
        records = parse_lines(lines, self.path, self._lines + 1)
        self._offset += sum(map(len, lines)) + len(lines)
        self._lines += len(lines)
        return records


class JsonTail:
    """Follows a file that grows, like ``tail -F``: it may also be truncated, replaced or missing.

    last: of a file that exists already, read at most this many bytes from its end; None: all of it.
    """

    def __init__(self, path: Path, last: int | None = None) -> None:
        self.path, self._offset, self._inode, self._last = path, 0, -1, last

    def read(self) -> tuple[bool, list[Record]]:
        """(whether the file was truncated or replaced, the objects appended since the last call).

        Damaged lines are skipped.
        """
        try:
            status = os.stat(self.path)
            anew = (status.st_ino != self._inode or status.st_size < self._offset) and self._inode != -1
            if status.st_ino != self._inode or anew:
                self._offset, self._inode = max(0, status.st_size - (self._last or status.st_size)), status.st_ino
            if status.st_size == self._offset:
                return anew, []
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
        except (FileNotFoundError, IsADirectoryError):
            return False, []
        lines, torn = split_lines(data)
        self._offset += len(data) - len(torn)
        return anew, [record for line in lines if (record := _object_or_none(line)) is not None]


def _object_or_none(line: bytes) -> Record | None:
    try:
        return decode(line)
    except (ValueError, RecursionError):
        return None


def _last_byte(file: IO[bytes], end: int) -> bytes:
    file.seek(end - 1)
    return file.read(1)
