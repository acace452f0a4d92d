"""metrics.jsonl: one object per update, each update exactly once, even after a kill; also copied to TensorBoard etc.

Every checkpoint stores the length of the file when it was taken, a checksum of all its lines, and a copy of the lines
of its stage. So any damage to the file is noticed, and can be repaired as long as the checkpoints exist.

Metrics that show that a run learns nothing are logged as the event ``learns_nothing``, each cause once per stage.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.recipe.tables import RunTable
from megarl.storage.checked_json import append_json, append_line
from megarl.storage.files import disk_errors
from megarl.storage.metrics.trackers import Trackers

UPDATES = 8  # consecutive updates that must show the same sign
# kind of sign, the metric that shows it, its least and largest value in all of these updates, and what that means
SIGNS = (
    ("no_variance", "zero_variance_fraction", 1.0, 1.0,
     "the responses to each prompt had equal rewards: no advantage differs from 0"),
    ("no_gradient", "grad_norm", 0.0, 0.0,
     "the gradient was 0: every token is clipped, vetoed or masked, or has advantage 0"),
    ("no_entropy", "entropy", 0.0, 1e-3, "the entropy was below 0.001 nats per token: the policy no longer explores"),
    ("no_sample", "ess", 0.0, 0.02,
     "the effective sample size was below 0.02 of the tokens: a few tokens dominate the gradient"),
)  # fmt: skip


@dataclass(frozen=True)
class Position:
    """A position between two lines of metrics.jsonl: the length and a checksum of all lines before it."""

    size: int = 0  # bytes
    chain: str = ""  # hash chain, in hexadecimal: sha256 of (the chain up to the last line + that line)

    def after(self, lines: Iterable[bytes]) -> Position:
        """The position after these further lines, each with its newline."""
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

    lines: the stage's lines before the position. update: the last update before the position.
    Raises `UserError` if the file is too short, which every start of a run repairs before.
    """

    def __init__(self, path: Path, position: Position, lines: bytes, update: int, run: RunTable) -> None:
        self.path, self.position, self._lines = path, position, bytearray(lines)
        with disk_errors(path), open(path, "ab") as file:
            if (size := file.tell()) < position.size:
                raise UserError(
                    f"{path} has {size} bytes, but had {position.size} at the checkpoint: start again to have it "
                    "restored from the checkpoints"
                )
            file.truncate(position.size)
        self._trackers = Trackers(path.parent, run, update + 1)
        self._recent: deque[dict[str, Any]] = deque(maxlen=UPDATES)
        self._said: set[tuple[int, str]] = set()

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
        self._watch(record)
        self._trackers.append(record)

    def _watch(self, record: dict[str, Any]) -> None:
        """Log an event if the last updates, of which ``record`` is one, learnt nothing."""
        self._recent.append(record)
        if len(self._recent) < UPDATES:
            return
        first, last = self._recent[0]["update"], record["update"]
        for kind, cause in find(list(self._recent)).items():
            if (record["stage"], kind) not in self._said:
                self._said.add((record["stage"], kind))
                event = {"time": round(time.time(), 3), "event": "learns_nothing", "stage": record["stage"]}
                event |= {"first": first, "update": last, "kind": kind, "cause": cause}
                append_json(self.path.with_name("events.jsonl"), event)

    def sync(self) -> None:
        """Sync the appended lines to disk. To be called before a checkpoint, since its updates are not made again."""
        with disk_errors(self.path), open(self.path, "rb") as file:
            os.fsync(file.fileno())

    def close(self) -> None:
        self.sync()
        self._trackers.close()


def find(records: list[dict[str, Any]]) -> dict[str, str]:
    """{kind: a sentence about it} of everything that kept all of these consecutive updates from learning."""
    found = {
        kind: cause
        for kind, metric, low, high, cause in SIGNS
        if all(metric in record and low <= record[metric] <= high for record in records)
    }
    if "no_variance" in found:
        found.pop("no_gradient", None)  # which follows from it
    return found
