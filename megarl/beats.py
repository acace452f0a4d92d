"""Signs of progress of the processes of a phase, by which their node agent sees that one stands still.

A process says again and again what it does, in a small file of its own (`megarl.workers.watch` reads it). Each sign
begins a step of some ``kind``; how long a step may take before the next sign is the agent's business.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

FILE = "MEGARL_BEATS"  # environment variable: the file of this process; without it nobody watches
WAITS = "wait"  # the kind of step in which a process does nothing but wait for others, and says so again and again
REPEAT_SECONDS = 0.02  # the same sign is not written more often
BYTES = 256


@dataclass(frozen=True)
class Beat:
    """The last sign of a process. ``number`` counts them."""

    number: int
    kind: str
    where: str

    def __str__(self) -> str:
        return f"{self.where} ({self.kind})" if self.where else self.kind


def beat(kind: str, where: str | None = None) -> None:
    """A step of this ``kind`` begins. ``where``: for a person; None: still what the last sign said. Microseconds."""
    if path := os.environ.get(FILE):
        _beats(path).beat(kind, where)


@functools.cache
def _beats(path: str) -> _Beats:
    return _Beats(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))


@dataclass
class _Beats:
    file: int
    last: Beat = field(default_factory=lambda: Beat(0, "", ""))
    at: float = 0.0

    def beat(self, kind: str, where: str | None) -> None:
        where, now = self.last.where if where is None else where[:120], time.monotonic()
        if (kind, where) == (self.last.kind, self.last.where) and now - self.at < REPEAT_SECONDS:
            return
        self.last, self.at = Beat(self.last.number + 1, kind, where), now
        with contextlib.suppress(OSError):
            os.pwrite(self.file, json.dumps(vars(self.last)).encode()[:BYTES].ljust(BYTES), 0)


def read_beat(path: Path) -> Beat | None:
    """The last sign in a file; None where there is none yet, or only a part of it at this moment."""
    try:
        return Beat(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
