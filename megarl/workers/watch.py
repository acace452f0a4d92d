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

LOST_SECONDS = 1.0  # at most this much counts between two checks; beyond it the watch itself was suspended
DUMP_SECONDS = 3.0  # so long processes may write their Python stacks, which takes milliseconds
START = Beat(0, "start", "")


@dataclass(frozen=True)
class Stall:
    """A stall that the watch has found."""

    text: str  # message for the user; its first line can stand alone
    certain: bool  # a process of this node is known to be stopped, so the cause is not on another node
    time: float  # when it was found, seconds since the epoch


@dataclass
class Watched:
    """A process to watch: its rank in the phase, its heartbeat file, and the log to which it writes its stacks."""

    rank: int
    pid: int
    beats: Path
    log: Path
    last: Beat = START
    idle: float = 0.0  # seconds since the last heartbeat
    waiting: float = 0.0  # seconds for which it has only waited for others

    def read_heartbeat(self, elapsed: float) -> None:
        """Poll the heartbeat, ``elapsed`` seconds after the previous poll."""
        self.idle += elapsed
        now = read_beat(self.beats)
        self.waiting = self.waiting + elapsed if now and now.kind == self.last.kind == WAITS else 0.0
        if now and now.number != self.last.number:
            self.last, self.idle = now, 0.0

    def __str__(self) -> str:
        return f"  rank {self.rank} (process {self.pid}): {self.last}, {self.idle:.0f} s ago, stack in {self.log}"


class Watch:
    """Watches the processes of one attempt at a phase on this node.

    seconds: ``[run] stall_seconds``.
    alone: there is no other node, so if all processes here wait for others for long, that is a stall too.
    warn: gets a message when a stall is found, before the processes are killed: what hangs may not die.
    """

    def __init__(self, watched: Sequence[Watched], seconds: float, alone: bool, warn: Callable[[str], None]) -> None:
        self.watched, self._seconds, self._alone, self._warn = watched, seconds, alone, warn
        self._last_check = time.monotonic()

    def check(self, ended: Collection[int]) -> Stall | None:
        """The stall, if a process has exceeded its limit, else None. Call it several times a second.

        ended: indices of the processes that have ended.
        """
        now = time.monotonic()
        elapsed, self._last_check = min(now - self._last_check, LOST_SECONDS), now
        running = self._running(ended)
        for one in running:
            one.read_heartbeat(elapsed)
        idle = max((one.idle for one in running), default=0.0)
        if self._alone and running:
            idle = max(idle, min(one.waiting for one in running))
        return self._stall(running, idle) if idle > self._seconds else None

    def stopped(self) -> Stall | None:
        """The stall, if a process here is stopped, however short ago: for when another node noticed a stall first."""
        return self._stall(self.watched, max(one.idle for one in self.watched)) if any(self._not_running()) else None

    def _running(self, ended: Collection[int]) -> list[Watched]:
        return [one for index, one in enumerate(self.watched) if index not in ended]

    def _stall(self, running: Sequence[Watched], idle: float) -> Stall:
        first, not_running = max(running, key=lambda one: one.idle), list(self._not_running())
        message = f"no progress for {idle:.0f} s: "
        message += "; ".join([f"rank {first.rank} was last seen at {first.last}", *not_running])
        self._warn(message)
        remedy = f"  A step may take [run] stall_seconds = {self._seconds:g}; raise it if this step was only slow"
        return Stall(f"{message}\n{remedy}", certain=bool(not_running), time=time.time())

    def _not_running(self) -> Iterator[str]:
        """Messages about stopped processes (state T): the watched ones, their descendants, and the fork server."""
        whose: dict[psutil.Process, str] = {}
        for watched in self.watched:
            with contextlib.suppress(psutil.Error):
                first = psutil.Process(watched.pid)
                whose |= dict.fromkeys([first, *first.children(recursive=True)], f" of rank {watched.rank} is stopped")
                if first.ppid() != os.getpid():
                    whose[psutil.Process(first.ppid())] = ", which started the others, is stopped"
        for one, description in whose.items():
            with contextlib.suppress(psutil.Error):
                if one.status() == psutil.STATUS_STOPPED:
                    yield f"process {one.pid} ({one.name()}){description}"

    def dump(self, ended: Collection[int]) -> None:
        """Have all processes write their Python stacks to their logs (`faulthandler`, in `megarl.phases.entry`).

        Stopped processes are continued, since they could not write otherwise: the caller must kill all of them next.
        """
        for one in self._running(ended):
            for number in (signal.SIGUSR1, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one.pid, number)
        time.sleep(DUMP_SECONDS)
