"""Heartbeats by which the processes of a phase show progress, so that their node agent notices when one stalls.

Each process overwrites its latest heartbeat in a small file of its own, which `megarl.workers.watch` polls. A heartbeat
marks the beginning of a step, which may take ``run.stall_seconds``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path

FILE = "MEGARL_BEATS"  # environment variable: path of this process's heartbeat file; unset: heartbeats are not written
WAITS = "wait"  # the kind of the heartbeats that a process repeats while it does nothing but wait for other processes
CHARACTERS = 120  # of the step in words
BYTES = 2048  # size of the file: JSON with every character escaped, which takes up to 12 bytes


@dataclass(frozen=True)
class Beat:
    """The latest heartbeat of a process."""

    number: int  # how many heartbeats the process has written, this one included
    kind: str  # of the step that began
    where: str  # the step in words, such as "update 412"

    def __str__(self) -> str:
        return f"{self.where} ({self.kind})" if self.where else self.kind


def beat(kind: str, where: str | None = None) -> None:
    """Record that a step of this ``kind`` begins; costs microseconds.

    where: the step in words, for messages; None keeps those of the previous heartbeat.
    """
    if path := os.environ.get(FILE):
        _beat_file(path).beat(kind, where)


@functools.cache
def _beat_file(path: str) -> _BeatFile:
    return _BeatFile(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))


@dataclass
class _BeatFile:
    descriptor: int
    last: Beat = Beat(0, "", "")

    def beat(self, kind: str, where: str | None) -> None:
        self.last = Beat(self.last.number + 1, kind, self.last.where if where is None else where[:CHARACTERS])
        with contextlib.suppress(OSError):
            os.pwrite(self.descriptor, json.dumps(vars(self.last)).encode()[:BYTES].ljust(BYTES), 0)


def read_beat(path: Path) -> Beat | None:
    """The heartbeat in a file; None if there is none yet, or if it is being written at this moment."""
    try:
        return Beat(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
