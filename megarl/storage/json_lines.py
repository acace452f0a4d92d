"""Files of JSON objects, one a line, that grow while others read them. Checksums of lines are verified and left out.

A killed writer may leave half a line at the end: readers leave it out, and the next writer cuts it off. A line before
it that cannot be read is damage: `read_json_lines` refuses the file, `read_intact_lines` and `JsonTail` skip the line.
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
    """Append one line with a checksum, from any process of any node. It is not synced to disk."""
    append_line(path, encode(record))


def append_line(path: Path, line: bytes) -> None:
    """`append_json` of a line that is there, with its newline."""
    created = not path.exists()
    with disk_errors(path), open(path, "ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ranks of several nodes append, which not every file system makes atomic
        if created:
            fsync_path(path.parent)
        end = file.seek(0, os.SEEK_END)
        if end and _last_byte(file, end) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line)


def read_json_lines(path: Path) -> list[Record]:
    """All objects of a file; `UserError` that names a damaged line."""
    return parse_lines(split_lines(path.read_bytes())[0], path)


def parse_lines(lines: list[bytes], path: Path, first: int = 1) -> list[Record]:
    """The objects of whole lines of ``path``, of which the first has the number ``first``; `UserError` for damage."""
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
    """The objects of a file that may be damaged, and how many lines are none, a torn last one included."""
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    records = [record for line in lines if (record := _object_or_none(line)) is not None]
    return records, len(lines) - len(records)


def split_lines(data: bytes) -> tuple[list[bytes], bytes]:
    """The whole lines of ``data``, without their newlines, and what is torn after the last of them."""
    *lines, torn = data.split(b"\n")
    return lines, torn


class StrictTail:
    """Follows a file that only grows, line by line; a damaged line is a `UserError`."""

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
    """Follows a file that grows; it may also be cut, replaced or missing.

    last: bytes of a file that is there already which are read at most, from its end.
    """

    def __init__(self, path: Path, last: int | None = None) -> None:
        self.path, self._offset, self._inode, self._last = path, 0, -1, last

    def read(self) -> tuple[bool, list[Record]]:
        """(True when the file began anew, the objects appended since the last call); other lines are skipped."""
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
