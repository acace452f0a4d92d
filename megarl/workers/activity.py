"""Notices that a node agent itself hangs, most often in a call to a file system that does not respond.

The agent's main thread polls the heartbeats of all phase processes (`megarl.workers.watch`), so nobody else would
notice that it hangs; another thread of the agent therefore checks its CPU time.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time

IDLE_SECONDS = 600.0  # without CPU time the thread counts as hanging; a healthy one polls all the time
LOST_SECONDS = 1.0  # at most this much counts between two checks; beyond it the whole process was suspended


class Activity:
    """Tracks the CPU time of the thread that constructs it; another thread calls `check`."""

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._spent, self._last_check = 0.0, time.monotonic()
        self._reported = False
        self.idle = 0.0  # seconds since the thread last used the CPU, without those in which the process was suspended
        self.time = 0.0  # seconds in which this process was not suspended

    def check(self) -> bool:
        """Whether the thread used the CPU within the last `IDLE_SECONDS`; call it often.

        If not, a message and the stacks of all threads go to stderr, once.
        """
        now, spent = time.monotonic(), time.clock_gettime(self._clock)
        elapsed, self._last_check = min(now - self._last_check, LOST_SECONDS), now
        self.time += elapsed
        self.idle, self._spent = (self.idle + elapsed if spent == self._spent else 0.0), spent
        if self.idle < IDLE_SECONDS:
            self._reported = False
        elif not self._reported:
            self._reported = True
            text = (
                f"megarl: no progress for {self.idle:.0f} s: this node agent hangs, most often because a file system "
                "does not respond. It continues as soon as the file system does. Its stack:\n"
            )
            os.write(2, text.encode())  # bypasses the progress display, in which the thread may hang
            faulthandler.dump_traceback(2)
        return self.idle < IDLE_SECONDS
