"""Keeps the signals that stop a run away from the processes that an engine starts below its phase process.

``python signals.py MODULE ARGUMENT ...`` is ``python -m MODULE`` with these signals blocked. It runs in SGLang's
interpreter, which cannot import megarl, so this file imports nothing of it.

A scheduler sends such signals to every process of a job, a terminal to a process group. But an engine whose workers
have ended can return nothing more, so they must live until the phase has collected their responses.
"""

from __future__ import annotations

import runpy
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

# Not SIGQUIT, which SGLang's processes use to tell each other of failures.
KEPT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Within this context, start processes in which the signals `KEPT` have no effect, nor in their descendants.

    The signals are blocked in them, so not even handlers that they install are called. One that reaches this process
    within the context is handled when the context ends.
    """
    resource_tracker.ensure_running()  # else multiprocessing would start it within the context, which unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, KEPT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path[0] = ""  # as with -m
    with kept_from_children():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
