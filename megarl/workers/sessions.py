"""Ends what a phase's processes leave behind, such as an engine's workers, before the next processes are started."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection

import psutil

from megarl.errors import PhaseFailed

POLL_SECONDS = 0.02
PATIENCE = 120.0  # seconds until a killed process must have ended; freeing a lot of GPU memory takes a while


def end_sessions(leaders: Collection[int]) -> None:
    """Kill what is left in the sessions of ended processes, ``leaders``, and wait until it is gone.

    An engine's workers are killed here. The guard of an engine's server, which has a process group of its own, is not:
    it ends the server by itself. `PhaseFailed` if processes are left after `PATIENCE`: they still hold their GPUs.
    """
    deadline = time.monotonic() + PATIENCE
    while left := [pid for pid in psutil.pids() if _lives_in(pid, leaders)]:
        if time.monotonic() > deadline:
            raise PhaseFailed(
                f"processes {left} of an ended phase still run {PATIENCE:.0f} s after they were killed, and may hold "
                "GPU memory: end them, then start the run again"
            )
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) in leaders:  # not the guard of a server
                    os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def _lives_in(pid: int, leaders: Collection[int]) -> bool:
    try:
        return os.getsid(pid) in leaders and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, PermissionError, psutil.Error):
        return False
