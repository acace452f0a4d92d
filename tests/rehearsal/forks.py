"""Runs functions, such as ranks of a test, in forks of a process that has imported everything."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SECONDS = 900  # limit for all ranks together: one may wait for another that hangs


def in_fork(function: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """The result of ``function()`` in a fork; an exception there becomes an AssertionError here, with its traceback."""
    (result,) = in_ranks(lambda rank: function(), 1, seconds)
    return result


def in_ranks(function: Callable[[int], Any], ranks: int, seconds: float = SECONDS) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="megarl-ranks-") as folder:
        files = [Path(folder) / str(rank) for rank in range(ranks)]
        running = {_fork(function, rank, ranks, files[rank]): rank for rank in range(ranks)}
        deadline = time.monotonic() + seconds
        failed = None
        while running and failed is None:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in running:
                rank = running.pop(pid)
                failed = rank if status else None
            elif time.monotonic() > deadline:
                failed = min(running.values())
            elif not pid:
                time.sleep(0.005)
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if failed is not None:
            text = files[failed].read_text() if files[failed].exists() else "killed: it took too long, or crashed"
            raise AssertionError(f"rank {failed} of {ranks}:\n{text}")
        return [pickle.loads(file.read_bytes()) for file in files]


def _fork(function: Callable[[int], Any], rank: int, ranks: int, file: Path) -> int:
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        # a fork's first call renews torch's thread pool: not by all threads of a backward pass at once, one per device
        torch.set_num_threads(1)
        file.write_bytes(pickle.dumps(function(rank)))
        code = 0
    except BaseException:
        file.write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
