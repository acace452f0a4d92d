"""Whether an agent does anything: its main thread may stand in a call to a file system that does not answer.

It is the thread that reads the signs of all others (`megarl.workers.watch`), so nobody else would notice.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time

IDLE_SECONDS = 600.0  # in which the thread did not run at all; it polls, and computes or reads otherwise
LOST_SECONDS = 1.0  # between two looks; more means that nothing of this process ran


class Activity:
    """Of the thread that makes it, looked at by another one."""

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._spent, self._looked = 0.0, time.monotonic()
        self._said = False
        self.idle = 0.0  # seconds without a moment of the CPU, of those in which this process ran
        self.time = 0.0  # seconds in which this process ran

    def look(self) -> bool:
        """Whether it has run within `IDLE_SECONDS`; to be called often. Where not, says once where it stands."""
        now, spent = time.monotonic(), time.clock_gettime(self._clock)
        elapsed, self._looked = min(now - self._looked, LOST_SECONDS), now
        self.time += elapsed
        self.idle, self._spent = (self.idle + elapsed if spent == self._spent else 0.0), spent
        if self.idle < IDLE_SECONDS:
            self._said = False
        elif not self._said:
            self._said = True
            text = (
                f"megarl: no progress for {self.idle:.0f} s: this agent stands still, most often because a file system "
                "does not answer. It goes on when that does. Where it stands:\n"
            )
            os.write(2, text.encode())  # not through a display, which may be what it stands in
            faulthandler.dump_traceback(2)
        return self.idle < IDLE_SECONDS
