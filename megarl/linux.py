"""What Linux offers beyond Python's ``os``: prctl, and the state of a process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import warnings

# <linux/prctl.h>
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies, however it dies, so that no orphan goes on writing.

    If the parent is dead already, this process kills itself.

    parent: the parent's process id. Without it, a process whose parent is init (process 1) counts as orphaned.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent if parent else os.getppid() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def fork() -> int:
    """`os.fork` without Python's warning that another thread may hold a lock for ever in the fork.

    The threads of a process that megarl forks are those that imports start, such as Arrow's jemalloc: they hold none.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def name_process(name: str) -> None:
    """Set the name that ``ps`` and ``top`` show, cut to 15 bytes; a fork's command line is that of its parent."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15])


def state_of(pid: int) -> str:
    """The state of a process, a letter as in proc(5) such as R (runs or waits for a CPU), S or T; "" once it ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]
    return ""
