"""Notices that a process of a phase stands still, by the signs that it gives (`megarl.beats`), and says where.

A step may take ``[run] stall_seconds``, or several times as long as the longest step of its kind so far; the first one
of a kind, which loads or compiles, has more time. The watch counts only seconds in which it runs itself: a job that is
suspended as a whole does not stand still.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from megarl.beats import WAITS, Beat, read_beat

FIRST = 6  # times `stall_seconds` for the first step of a kind
SLOWER = 5  # times the longest step so far
MOST = 30  # times `stall_seconds`, whatever the longest step was
LOST_SECONDS = 1.0  # between two looks; more means that the watch itself did not run
TREE_SECONDS = 1.0  # at least, between two looks at all processes that the phase's own have started
DUMP_SECONDS = 10.0  # for Python to write stacks
QUIET_SECONDS = 1.0  # in which a process that is writing its stacks writes some of them
NCCL_SECONDS = 10.0  # for NCCL's monitor, which looks into its pipe every second or so
START = Beat(0, "start", "")


@dataclass(frozen=True)
class Stall:
    """What stands still, for a person, the first line by itself. ``certain``: a process here is known to be stopped."""

    text: str
    certain: bool


@dataclass(frozen=True)
class Watched:
    """A process: its rank in the phase, the file with its signs, and the log to which its stacks go."""

    rank: int
    beats: Path
    log: Path


class Watch:
    """Of the processes of one attempt at a phase on this node.

    seconds: ``[run] stall_seconds``. alone: there is no other node for which all of them could wait. warn: is told in
    one line, before anything is done about it. nccl: the beginnings of the paths of NCCL's pipes and of its dumps.
    """

    def __init__(
        self,
        watched: Sequence[Watched],
        seconds: float,
        alone: bool,
        warn: Callable[[str], None],
        nccl: tuple[Path, Path] | None = None,
    ) -> None:
        self._watched, self._seconds, self._alone, self._nccl = watched, seconds, alone, nccl
        self._warn = warn
        self._beats = [START for _ in watched]
        self._idle = [0.0 for _ in watched]  # since the last sign
        self._waiting = [0.0 for _ in watched]  # for others, without a break
        self._stopped: dict[int, float] = {}  # process id -> for how long it has been seen to be stopped
        self._longest: dict[str, float] = {}  # kind -> seconds of its longest step
        self._looked, self._time, self._looked_at_tree = time.monotonic(), 0.0, 0.0

    def look(self, pids: Sequence[int], ended: Collection[int]) -> Stall | None:
        """What stands still; None as long as nothing does. To be called often.

        pids: of the processes, of which those with the indices ``ended`` have ended.
        """
        now = time.monotonic()
        elapsed, self._looked = min(now - self._looked, LOST_SECONDS), now
        self._time += elapsed
        running = [index for index in range(len(pids)) if index not in ended]
        for index in running:
            self._listen(index, elapsed)
        late = [index for index in running if self._idle[index] > self._limit(self._beats[index].kind)]
        stopped = self._long_stopped([pids[index] for index in running])
        everybody_waits = self._alone and all(self._waiting[index] > FIRST * self._seconds for index in running)
        if not running or not (late or stopped or everybody_waits):
            return None
        idle = max((self._idle[index] for index in running), default=0.0)
        if not late:
            idle = max([*stopped.values(), *(self._waiting if everybody_waits else ())])
        first, not_running = max(running, key=lambda index: self._idle[index]), list(self._not_running(pids))
        last = f"rank {self._watched[first].rank} was last seen at {self._beats[first]}"
        message = f"no progress for {idle:.0f} s: {'; '.join([last, *not_running])}"
        self._warn(message)
        return Stall("\n".join([message, *self.describe(pids), self._remedy()]), certain=bool(not_running))

    def _listen(self, index: int, elapsed: float) -> None:
        self._idle[index] += elapsed
        before, now = self._beats[index], read_beat(self._watched[index].beats)
        self._waiting[index] = self._waiting[index] + elapsed if now and now.kind == before.kind == WAITS else 0.0
        if now is None or now.number == before.number:
            return
        if before is not START:
            self._longest[before.kind] = max(self._longest.get(before.kind, 0.0), self._idle[index])
        self._beats[index], self._idle[index] = now, 0.0

    def _limit(self, kind: str) -> float:
        longest = self._longest.get(kind)
        if longest is None and kind != WAITS:
            return FIRST * self._seconds
        return min(max(self._seconds, SLOWER * (longest or 0.0)), MOST * self._seconds)

    def _long_stopped(self, pids: Sequence[int]) -> dict[int, float]:
        """Processes below the phase's own that have been stopped for too long, such as an engine's; {id: seconds}."""
        elapsed = self._time - self._looked_at_tree
        if elapsed < max(TREE_SECONDS, self._seconds / 4):
            return {}
        self._looked_at_tree = self._time
        stopped = [process.pid for pid in pids for process in _descendants(pid) if _state(process.pid) == "T"]
        self._stopped = {pid: self._stopped[pid] + elapsed if pid in self._stopped else 0.0 for pid in stopped}
        return {pid: seconds for pid, seconds in self._stopped.items() if seconds > self._seconds}

    def _not_running(self, pids: Sequence[int]) -> Iterator[str]:
        """Processes that do not run at all; their parents too, since the one that starts all may be stopped."""
        for watched, pid in zip(self._watched, pids, strict=True):
            for one in (pid, *(process.pid for process in _descendants(pid))):
                if _state(one) == "T":
                    yield f"process {one} ({_name(one)}) of rank {watched.rank} is stopped"
        for parent in sorted({parent for pid in pids if (parent := _parent(pid)) and parent != os.getpid()}):
            if _state(parent) == "T":
                yield f"process {parent} ({_name(parent)}), which started the others, is stopped"

    def describe(self, pids: Sequence[int]) -> list[str]:
        """One line a rank: where it was last seen, and how long ago."""
        lines = zip(self._watched, self._beats, self._idle, pids, strict=True)
        return [
            f"  rank {one.rank} (process {pid}): {beat}, {idle:.0f} s ago, stack in {one.log}"
            for one, beat, idle, pid in lines
        ]

    def _remedy(self) -> str:
        return (
            f"  [run] stall_seconds = {self._seconds:g} is how long a step may take, where none of its kind has taken "
            f"long; raise it if this one only was slow"
        )

    def dump(self, pids: Sequence[int]) -> list[str]:
        """Have all processes write their Python stacks to their logs, and NCCL what it was in; returns what to read.

        Stopped ones go on for this, as nothing else would make them write: they are to be killed next.
        """
        everyone = [one for pid in pids for one in (pid, *(process.pid for process in _descendants(pid)))]
        sizes = [_size(watched.log) for watched in self._watched]
        asked = [one for one in everyone if _handles(one, signal.SIGUSR1)]
        for one in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGUSR1)
        for one in everyone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGCONT)
        expected = [index for index, pid in enumerate(pids) if pid in asked]
        _wait(DUMP_SECONDS, lambda: all(_size(self._watched[i].log) > sizes[i] for i in expected))
        if asked:
            self._wait_for_whole_stacks()
        return self._dump_nccl()

    def _wait_for_whole_stacks(self) -> None:
        """Nothing marks the end of a stack: until the logs have not grown for a moment."""
        sizes, grown = [_size(watched.log) for watched in self._watched], time.monotonic()

        def quiet() -> bool:
            nonlocal sizes, grown
            if (now := [_size(watched.log) for watched in self._watched]) != sizes:
                sizes, grown = now, time.monotonic()
            return time.monotonic() - grown > QUIET_SECONDS

        _wait(DUMP_SECONDS, quiet)

    def _dump_nccl(self) -> list[str]:
        """Through the pipes of torch's flight recorder (ProcessGroupNCCL.hpp of torch 2.11 to 2.13)."""
        if self._nccl is None:
            return []
        (pipes, dumps), asked = self._nccl, []
        for path in sorted(pipes.parent.glob(f"{pipes.name}*.pipe")):
            with contextlib.suppress(OSError):  # it has ended
                pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
                os.write(pipe, b"dump\n")
                os.close(pipe)
                asked.append(Path(f"{dumps}{path.stem.removeprefix(pipes.name)}"))
        _wait(NCCL_SECONDS, lambda: all(_size(dump) for dump in asked))
        return [f"  NCCL's flight recorder wrote {dump}" for dump in asked if _size(dump)]


def _wait(seconds: float, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _parent(pid: int) -> int | None:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).ppid()
    return None


def _name(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).name()
    return "ended"


def _state(pid: int) -> str:
    """R, S, D, T, Z, ... of proc(5); "" for a process that has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
    return ""


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        caught = next(line for line in file if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    return False
