"""What the processes of a phase leave behind when they are killed: nothing of it may live when the next ones start."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection

import psutil

from megarl.errors import PhaseFailed

POLL_SECONDS = 0.02
PATIENCE = 120.0  # seconds; a process that frees much memory of a GPU takes some


def end_sessions(leaders: Collection[int]) -> None:
    """Return when no process is left in the sessions of these processes, which have ended.

    Workers of an engine are killed here; its server's guard, in a process group of its own, ends the server by itself.
    `PhaseFailed` if some cannot be killed, since they still hold their GPUs.
    """
    deadline = time.monotonic() + PATIENCE
    while left := [pid for pid in psutil.pids() if _lives_in(pid, leaders)]:
        if time.monotonic() > deadline:
            raise PhaseFailed(f"processes {left} of an ended phase still run {PATIENCE:.0f} s after they were killed")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) in leaders:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def _lives_in(pid: int, leaders: Collection[int]) -> bool:
    try:
        return os.getsid(pid) in leaders and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, PermissionError, psutil.Error):
        return False
