"""Notices a stalled process of a phase by its missing heartbeats (`megarl.heartbeats`), and reports where it is stuck.

A step may take ``[run] stall_seconds``. Only time in which the watch itself runs is counted, so a job that is suspended
as a whole does not count as stalled.
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

from megarl.heartbeats import WAITS, Beat, read_beat
from megarl.linux import state_of

LOST_SECONDS = 1.0  # at most this much counts between two checks; beyond it the watch itself was suspended
TREE_SECONDS = 1.0  # least time between two checks of all descendants of the phase's processes
DUMP_SECONDS = 10.0  # timeout for processes to write their Python stacks
QUIET_SECONDS = 1.0  # stacks count as complete once no log has grown for so long
NCCL_SECONDS = 10.0  # timeout for NCCL's monitor thread, which polls its pipe about every second
START = Beat(0, "start", "")


@dataclass(frozen=True)
class Stall:
    """A stall that the watch has found."""

    text: str  # message for the user; its first line can stand alone
    certain: bool  # a process of this node is known to be stopped, so the cause is not on another node


@dataclass(frozen=True)
class Watched:
    """A process to watch: its rank in the phase, its heartbeat file, and the log to which it writes its stacks."""

    rank: int
    pid: int
    beats: Path
    log: Path


class Watch:
    """Watches the processes of one attempt at a phase on this node.

    seconds: ``[run] stall_seconds``.
    alone: there is no other node, so if all processes here wait for others for long, that is a stall too.
    warn: callback that gets a one-line message when a stall is found, before anything is killed.
    nccl: path prefixes of the pipes and of the dumps of torch's NCCL flight recorder; None without NCCL.
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
        self._idle = [0.0 for _ in watched]  # seconds since the last heartbeat
        self._waiting = [0.0 for _ in watched]  # seconds for which it has only waited for others
        self._stopped: dict[int, float] = {}  # process id -> seconds for which it has been in state T (stopped)
        self._last_check, self._time = time.monotonic(), 0.0  # `_time`: seconds in which the watch ran
        self._tree_checked = 0.0  # `_time` at the last check of descendants

    def check(self, ended: Collection[int]) -> Stall | None:
        """The stall, if a process has exceeded its limit, else None. Call it several times a second.

        ended: indices of the processes that have ended.
        """
        now = time.monotonic()
        elapsed, self._last_check = min(now - self._last_check, LOST_SECONDS), now
        self._time += elapsed
        running = [index for index in range(len(self._watched)) if index not in ended]
        for index in running:
            self._read_heartbeat(index, elapsed)
        late = [index for index in running if self._idle[index] > self._seconds]
        stopped = self._long_stopped([self._watched[index].pid for index in running])
        everybody_waits = self._alone and all(self._waiting[index] > self._seconds for index in running)
        if not running or not (late or stopped or everybody_waits):
            return None
        idle = max((self._idle[index] for index in running), default=0.0)
        if not late:
            idle = max([*stopped.values(), *(self._waiting if everybody_waits else ())])
        return self._stall(running, idle)

    def stopped(self) -> Stall | None:
        """The stall, if a process here is stopped, however short ago: for when another node noticed a stall first."""
        return self._stall(range(len(self._watched)), max(self._idle)) if any(self._not_running()) else None

    def _stall(self, running: Sequence[int], idle: float) -> Stall:
        first, not_running = max(running, key=lambda index: self._idle[index]), list(self._not_running())
        last = f"rank {self._watched[first].rank} was last seen at {self._beats[first]}"
        message = f"no progress for {idle:.0f} s: {'; '.join([last, *not_running])}"
        self._warn(message)
        return Stall("\n".join([message, *self.describe(), self._remedy()]), certain=bool(not_running))

    def _read_heartbeat(self, index: int, elapsed: float) -> None:
        """Poll the heartbeat of a process, ``elapsed`` seconds after the previous poll."""
        self._idle[index] += elapsed
        before, now = self._beats[index], read_beat(self._watched[index].beats)
        self._waiting[index] = self._waiting[index] + elapsed if now and now.kind == before.kind == WAITS else 0.0
        if now is None or now.number == before.number:
            return
        self._beats[index], self._idle[index] = now, 0.0

    def _long_stopped(self, pids: Sequence[int]) -> dict[int, float]:
        """Descendants of the phase's processes, such as an engine's, that are stopped for too long: {id: seconds}."""
        elapsed = self._time - self._tree_checked
        if elapsed < max(TREE_SECONDS, self._seconds / 4):
            return {}
        self._tree_checked = self._time
        stopped = [one for pid in pids for one in _tree(pid)[1:] if state_of(one) == "T"]
        self._stopped = {pid: self._stopped[pid] + elapsed if pid in self._stopped else 0.0 for pid in stopped}
        return {pid: seconds for pid, seconds in self._stopped.items() if seconds > self._seconds}

    def _not_running(self) -> Iterator[str]:
        """Messages about stopped processes (state T): the watched ones, their descendants, and the fork server."""
        for watched in self._watched:
            for one in _tree(watched.pid):
                if state_of(one) == "T":
                    yield f"process {one} ({_name(one)}) of rank {watched.rank} is stopped"
        for parent in sorted({_parent(watched.pid) for watched in self._watched}):
            if parent != os.getpid() and state_of(parent) == "T":
                yield f"process {parent} ({_name(parent)}), which started the others, is stopped"

    def describe(self) -> list[str]:
        """One line per rank with its last heartbeat and how long ago that was."""
        return [
            f"  rank {one.rank} (process {one.pid}): {beat}, {idle:.0f} s ago, stack in {one.log}"
            for one, beat, idle in zip(self._watched, self._beats, self._idle, strict=True)
        ]

    def _remedy(self) -> str:
        return f"  A step may take [run] stall_seconds = {self._seconds:g}; raise it if this step was only slow"

    def dump(self) -> list[str]:
        """Have all processes write their Python stacks to their logs, and NCCL its last collectives to files.

        Returns messages that name the files of NCCL. Stopped processes are continued, since they could not write
        otherwise: the caller must kill all of them next.
        """
        everyone = [one for watched in self._watched for one in _tree(watched.pid)]
        sizes = {watched: _size(watched.log) for watched in self._watched}
        asked = [one for one in everyone if _handles(one, signal.SIGUSR1)]
        for one in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGUSR1)
        for one in everyone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGCONT)
        expected = [watched for watched in self._watched if watched.pid in asked]
        _wait(DUMP_SECONDS, lambda: all(_size(watched.log) > sizes[watched] for watched in expected))
        if asked:
            self._wait_for_whole_stacks()
        return self._dump_nccl()

    def _wait_for_whole_stacks(self) -> None:
        """Wait until the logs have stopped growing, since nothing marks the end of a stack."""
        sizes, grown = [_size(watched.log) for watched in self._watched], time.monotonic()

        def quiet() -> bool:
            nonlocal sizes, grown
            if (now := [_size(watched.log) for watched in self._watched]) != sizes:
                sizes, grown = now, time.monotonic()
            return time.monotonic() - grown > QUIET_SECONDS

        _wait(DUMP_SECONDS, quiet)

    def _dump_nccl(self) -> list[str]:
        """Ask for dumps through the pipes of torch's flight recorder (ProcessGroupNCCL.hpp of torch 2.11 to 2.13)."""
        if self._nccl is None:
            return []
        (pipes, dumps), asked = self._nccl, []
        for path in sorted(pipes.parent.glob(f"{pipes.name}*.pipe")):
            with contextlib.suppress(OSError):  # the process has ended
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


def _tree(pid: int) -> list[int]:
    """A process and its descendants."""
    with contextlib.suppress(psutil.Error):
        return [pid, *(process.pid for process in psutil.Process(pid).children(recursive=True))]
    return [pid]


def _parent(pid: int) -> int:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).ppid()
    return os.getpid()


def _name(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).name()
    return "ended"


def _handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; without one, SIGUSR1 would kill it."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        caught = next(line for line in file if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    return False
