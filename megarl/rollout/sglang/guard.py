"""``python guard.py PARENT COMMAND ...``: a command whose whole tree of processes ends with it and with its parent.

A phase may be killed at any moment. What the kernel can then do, signal the children, does not reach the children of a
server. So a server stands below this process, which adopts those of its descendants that lose their parent, and kills
all of them when the command or PARENT, the process that started this one, ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    kernel = ctypes.CDLL(None)
    signal.signal(signal.SIGTERM, stop)
    kernel.prctl(PR_SET_CHILD_SUBREAPER, 1)
    kernel.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)  # it ended before the line above
    try:
        # should this process be killed itself, its child goes with it
        server = subprocess.Popen(command, preexec_fn=lambda: kernel.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
        code = server.wait()
    finally:
        kill_descendants()
    sys.exit(code if code >= 0 else 128 - code)


def stop(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def kill_descendants() -> None:
    """Returns when none is left."""
    while True:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        try:
            os.wait()  # orphans too are children of this process
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
