"""Notices a stalled process of a phase by its missing heartbeats (`megarl.heartbeats`), and reports where it is stuck.

A step may take ``[run] stall_seconds``. Only time in which the watch itself runs is counted, so a job that is suspended
as a whole does not count as stalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from megarl.heartbeats import WAITS, Beat, read_beat

LOST_SECONDS = 1.0  # at most this much counts between two checks; beyond it the watch itself was suspended
DUMP_SECONDS = 5.0  # for processes to write their Python stacks, which takes milliseconds
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
    """

    def __init__(self, watched: Sequence[Watched], seconds: float, alone: bool) -> None:
        self._watched, self._seconds, self._alone = watched, seconds, alone
        self._beats = [START for _ in watched]
        self._idle = [0.0 for _ in watched]  # seconds since the last heartbeat
        self._waiting = [0.0 for _ in watched]  # seconds for which it has only waited for others
        self._last_check = time.monotonic()

    def check(self, ended: Collection[int]) -> Stall | None:
        """The stall, if a process has exceeded its limit, else None. Call it several times a second.

        ended: indices of the processes that have ended.
        """
        now = time.monotonic()
        elapsed, self._last_check = min(now - self._last_check, LOST_SECONDS), now
        running = [index for index in range(len(self._watched)) if index not in ended]
        for index in running:
            self._read_heartbeat(index, elapsed)
        idle = max((self._idle[index] for index in running), default=0.0)
        if self._alone and running:
            idle = max(idle, min(self._waiting[index] for index in running))
        return self._stall(running, idle) if idle > self._seconds else None

    def stopped(self) -> Stall | None:
        """The stall, if a process here is stopped, however short ago: for when another node noticed a stall first."""
        return self._stall(range(len(self._watched)), max(self._idle)) if any(self._not_running()) else None

    def _read_heartbeat(self, index: int, elapsed: float) -> None:
        """Poll the heartbeat of a process, ``elapsed`` seconds after the previous poll."""
        self._idle[index] += elapsed
        before, now = self._beats[index], read_beat(self._watched[index].beats)
        self._waiting[index] = self._waiting[index] + elapsed if now and now.kind == before.kind == WAITS else 0.0
        if now is not None and now.number != before.number:
            self._beats[index], self._idle[index] = now, 0.0

    def _stall(self, running: Sequence[int], idle: float) -> Stall:
        first, not_running = max(running, key=lambda index: self._idle[index]), list(self._not_running())
        last = f"rank {self._watched[first].rank} was last seen at {self._beats[first]}"
        message = f"no progress for {idle:.0f} s: {'; '.join([last, *not_running])}"
        print(f"megarl: {message}", file=sys.stderr, flush=True)  # now: what hangs may not die when it is killed
        remedy = f"  A step may take [run] stall_seconds = {self._seconds:g}; raise it if this step was only slow"
        return Stall(f"{message}\n{remedy}", certain=bool(not_running))

    def _not_running(self) -> Iterator[str]:
        """Messages about stopped processes (state T): the watched ones, their descendants, and the fork server."""
        ranks = {watched.pid: f" of rank {watched.rank} is stopped" for watched in self._watched}
        for one in psutil.Process().children(recursive=True):
            with contextlib.suppress(ProcessLookupError, psutil.Error):
                if one.status() == psutil.STATUS_STOPPED:
                    whose = ranks.get(os.getsid(one.pid), ", which started the others, is stopped")
                    yield f"process {one.pid} ({one.name()}){whose}"

    def describe(self) -> list[str]:
        """One line per rank with its last heartbeat and how long ago that was."""
        return [
            f"  rank {one.rank} (process {one.pid}): {beat}, {idle:.0f} s ago, stack in {one.log}"
            for one, beat, idle in zip(self._watched, self._beats, self._idle, strict=True)
        ]

    def dump(self, ended: Collection[int]) -> None:
        """Have all processes write their Python stacks to their logs (`faulthandler`, in `megarl.phases.entry`).

        Stopped processes are continued, since they could not write otherwise: the caller must kill all of them next.
        """
        for index, watched in enumerate(self._watched):
            for number in (signal.SIGUSR1, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    if index not in ended:
                        os.kill(watched.pid, number)
        time.sleep(DUMP_SECONDS)
