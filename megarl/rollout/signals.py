"""Signals that stop a run are for its phase processes alone, not for what an engine starts below them.

A scheduler sends them to every process of a job, a terminal to a process group. An engine whose workers have ended can
hand out nothing any more, so these must live until the phase has taken what they did.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

# Not SIGQUIT, with which SGLang's processes tell each other of failures.
KEPT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Processes that are started within never get `KEPT`, and neither does what they start.

    These signals stay blocked in them, so that handlers of their own are never called. One that reaches this process
    meanwhile is handled at the end.
    """
    resource_tracker.ensure_running()  # else multiprocessing would start it within, which unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, KEPT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
