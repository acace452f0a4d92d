"""``python guard.py PARENT COMMAND ...``: runs a command and kills all of its processes when it or PARENT ends.

PARENT is the pid of the phase process that started this one; it may be killed at any moment. The kernel can then signal
its children, but not the children of a server. So this process runs between phase and server: it adopts descendants
that lose their parent, and kills all descendants. SIGUSR1 asks it to do so; signals that stop a run are ignored, since
they may reach every process of a job and only the phase decides when its server ends (`megarl.rollout.signals`).
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
END = signal.SIGUSR1
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    kernel = ctypes.CDLL(None)
    # not handled: Python would run a handler only after a wait for the server that begins just after the signal
    awaited = {END, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    kernel.prctl(PR_SET_CHILD_SUBREAPER, 1)
    kernel.prctl(PR_SET_PDEATHSIG, END)
    if os.getppid() != parent:
        sys.exit(1)  # the parent ended before the line above

    def in_server() -> None:
        kernel.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # if this process itself is killed, the kernel kills the command
        signal.pthread_sigmask(signal.SIG_UNBLOCK, awaited)

    try:
        server = subprocess.Popen(command, preexec_fn=in_server)
        while (code := server.poll()) is None and signal.sigwait(awaited) != END:
            pass
    finally:
        kill_descendants()
    sys.exit(0 if code is None else code if code >= 0 else 128 - code)


def kill_descendants() -> None:
    """Kill all descendants, repeatedly, until none is left."""
    while True:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        try:
            os.wait()  # orphans have become children of this process
        except ChildProcessError:
            return


if __name__ == "__main__":
    main()
