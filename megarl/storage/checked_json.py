"""JSON objects that contain their own checksum, so that damage is detected when they are read."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.storage.files import write_atomic

Record = dict[str, Any]
_CHECKSUM = re.compile(rb',\s+"crc": "([0-9a-f]{8})"\s*}\s*')


def encode(record: Record, indent: int | None = None) -> bytes:
    """JSON, on one line or indented, whose last field ``crc`` is the CRC-32 of all bytes before it."""
    text = json.dumps(record, indent=indent).encode()
    if indent is None:
        body = text.removesuffix(b"}")
        return body + b', "crc": "%08x"}\n' % zlib.crc32(body)
    body = text.removesuffix(b"\n}")
    return body + b',\n%s"crc": "%08x"\n}\n' % (b" " * indent, zlib.crc32(body))


def decode(data: bytes, needs_checksum: bool = False) -> Record:
    """The object without its checksum; ValueError if it is wrong, or missing although ``needs_checksum``."""
    begin = data.rfind(b'"crc": ')
    begin = data.rfind(b",", 0, begin) if begin > 0 else -1
    found = _CHECKSUM.fullmatch(data, begin) if begin > 0 else None
    if found and zlib.crc32(data[:begin]) != int(found[1], 16):
        raise ValueError("it does not match its checksum")
    if needs_checksum and not found:
        raise ValueError("it has no checksum")
    record = json.loads(data)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if found:
        del record["crc"]
    return record


def write_checked(path: Path, record: Record) -> None:
    """Atomically replace the file ``path`` by ``record`` with its checksum."""
    write_atomic(path, encode(record, indent=1))


def read_checked(path: Path, remedy: str, needs_checksum: bool = False) -> Record:
    """Read what `write_checked` wrote; `UserError`, ending with ``remedy``, if the file is damaged or missing."""
    try:
        return decode(path.read_bytes(), needs_checksum)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}. {remedy}") from error
