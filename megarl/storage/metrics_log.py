"""metrics.jsonl: one object per update, each update exactly once, even after a kill; also copied to TensorBoard etc.

Every checkpoint stores the length of the file when it was taken, a checksum of all its lines, and a copy of the lines
of its stage. So any damage to the file is noticed, and can be repaired as long as the checkpoints exist.
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
    """A place between two lines of metrics.jsonl: the length and a checksum of all lines before it."""

    size: int = 0  # bytes
    chain: str = ""  # hash chain, in hexadecimal: sha256 of (the chain up to the last line + that line)

    def after(self, lines: Iterable[bytes]) -> Position:
        """The place after these further lines, each with its newline."""
        size, chain = self.size, self.chain
        for line in lines:
            size, chain = size + len(line), hashlib.sha256(chain.encode() + line).hexdigest()
        return Position(size, chain)


NOTHING = Position()  # the beginning of the file


def agrees(path: Path, position: Position) -> bool:
    """Whether a metrics file begins with exactly the lines that ``position`` stands for; more lines may follow."""
    try:
        with open(path, "rb") as file:
            lines = file.read(position.size).splitlines(keepends=True)
    except FileNotFoundError:
        lines = []
    return NOTHING.after(lines) == position


class MetricsWriter:
    """Continues ``path`` at ``position``. Lines after it, of updates that a kill has undone, are removed.

    lines: the stage's lines before the position; they are written again if the file does not have them.
    update: the last update before the position.
    Raises `UserError` if the file is too short to contain the lines of the stages before.
    """

    def __init__(self, path: Path, position: Position, lines: bytes, update: int, run: RunTable) -> None:
        self.path, self.position, self._lines = path, position, bytearray(lines)
        before = position.size - len(lines)
        with disk_errors(path), open(path, "ab+") as file:
            size = file.seek(0, os.SEEK_END)
            if size < before:
                raise UserError(
                    f"{path} has {size} bytes, but the lines of earlier stages take {before}: restore it from a copy, "
                    "or start again to have it restored from their checkpoints"
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
        """The lines of the stage so far."""
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
        """Sync the appended lines to disk. To be called before a checkpoint, since its updates are not made again."""
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
        # one event with all numbers of the update: one event per number would take five times as long
        self.writer._get_file_writer().add_summary(type(scalar("", 0.0))(value=values), record["update"])

    def close(self) -> None:
        self.writer.close()
