"""What Linux can do for a process that Python's ``os`` has no function for."""

from __future__ import annotations

import ctypes
import os
import signal

# <linux/prctl.h>
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies, however it dies: no orphan ever writes.

    parent: its process id, where this process knows it; else init is taken for the sign that it died before.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent if parent else os.getppid() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def name_process(name: str) -> None:
    """As ``ps`` and ``top`` show it, at most 15 bytes. A fork has the command line of its parent."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15])
