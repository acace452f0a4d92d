"""metrics.jsonl: one object an update, each update exactly once, also after a kill. Copies go elsewhere too.

Every checkpoint says how long the file was when it was taken, with a checksum of all its lines, and has a copy of those
of its stage. So whatever happens to the file is noticed, and mended as long as the checkpoints are there.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.recipe.tables import RunTable
from megarl.storage.files import disk_errors
from megarl.storage.json_lines import append_line
from megarl.storage.learning import LearningWatch
from megarl.storage.trackers import open_trackers


@dataclass(frozen=True)
class Position:
    """A place in metrics.jsonl: the bytes and the checksum of all lines before it."""

    size: int = 0  # bytes
    chain: str = ""  # sha256, in hexadecimal, of the chain before a line and the line

    def after(self, lines: Iterable[bytes]) -> Position:
        """The place after some more lines, each with its newline."""
        size, chain = self.size, self.chain
        for line in lines:
            size, chain = size + len(line), hashlib.sha256(chain.encode() + line).hexdigest()
        return Position(size, chain)


NOTHING = Position()  # the beginning of the file


def agrees(path: Path, position: Position) -> bool:
    """Whether a metrics file has the lines that a position stands for, whatever follows them."""
    try:
        with open(path, "rb") as file:
            lines = file.read(position.size).splitlines(keepends=True)
    except FileNotFoundError:
        lines = []
    return NOTHING.after(lines) == position


class MetricsWriter:
    """Continues ``path`` at ``position``: what follows there, lines of updates that a kill undid, is dropped.

    lines: those before the position that belong to the stage; they are written again where they are not in the file.
    update: the last one before the position. `UserError` where the file is too short to have the stages before.
    """

    def __init__(self, path: Path, position: Position, lines: bytes, update: int, run: RunTable) -> None:
        self.path, self.position, self._lines = path, position, bytearray(lines)
        before = position.size - len(lines)
        with disk_errors(path), open(path, "ab+") as file:
            size = file.seek(0, os.SEEK_END)
            if size < before:
                raise UserError(
                    f"{path} has {size} bytes, but the stages before take {before}: restore it from a copy, or start "
                    "again, so that it is restored from their checkpoints"
                )
            file.seek(before)
            if file.read(len(lines)) == lines:
                file.truncate(position.size)
            else:
                file.truncate(before)
                file.write(lines)
        self.sinks: list[Any] = [LearningWatch(path.with_name("events.jsonl"))]
        if run.tensorboard:
            self.sinks.append(_TensorBoard(path.parent / "tensorboard", update + 1))
        self.sinks += open_trackers(path.parent, run)

    @property
    def lines(self) -> bytes:
        """Those of the stage."""
        return bytes(self._lines)

    def append(self, record: dict[str, Any]) -> None:
        """Add the metrics of one update."""
        line = json.dumps(record).encode() + b"\n"
        append_line(self.path, line)
        self.position = self.position.after([line])
        self._lines += line
        for sink in self.sinks:
            sink.append(record)

    def sync(self) -> None:
        """Make what was appended durable: before a checkpoint, after which these updates are not made again."""
        with disk_errors(self.path), open(self.path, "rb") as file:
            os.fsync(file.fileno())

    def close(self) -> None:
        self.sync()
        for sink in self.sinks:
            sink.close()


class _TensorBoard:
    def __init__(self, directory: Path, first_update: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(directory), purge_step=first_update)

    def append(self, record: dict[str, Any]) -> None:
        from torch.utils.tensorboard.summary import scalar

        scalars = {k: v for k, v in record.items() if k != "update" and not isinstance(v, dict)}  # no histograms
        values = [value for name, number in scalars.items() for value in scalar(name, number).value]
        # one event with all of an update's numbers: an event each would take five times as long
        self.writer._get_file_writer().add_summary(type(scalar("", 0.0))(value=values), record["update"])

    def close(self) -> None:
        self.writer.close()
