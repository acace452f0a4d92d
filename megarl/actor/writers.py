"""The forked processes that write a checkpoint while training goes on, and what is done when one of them dies.

Megatron-Core 0.16 forks one process a rank, which forks those that write (0.19 has threads instead of the latter). It
waits for ever for one of the latter that was killed, and does not say what became of the former; the kernel kills just
these when memory is short.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import re
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from torch.distributed.checkpoint import CheckpointException

from megarl.beats import beat
from megarl.storage.checkpoints import FileSum
from megarl.storage.files import disk_errors

POLL_SECONDS = 0.02


class ForkedResults:
    """What the forked writers of one checkpoint have to say: a file both sides have open. Like Megatron's own queue.

    Megatron's queue is served by another process, which would outlive a killed rank. A pipe would fill up, since it is
    read only after the writers have ended.
    """

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - the writers inherit it

    def put(self, results: Any) -> None:
        pickle.dump(results, self.file)
        self.file.flush()

    def get_nowait(self) -> Any:
        self.file.seek(0)
        try:
            results = pickle.load(self.file)
        except EOFError as error:
            raise queue.Empty from error
        self.file.seek(0)
        self.file.truncate()
        return results


class Saving(AsyncCallsQueue):
    """The checkpoint being written, if any."""

    def __init__(self) -> None:
        super().__init__()
        self._path, self._name, self._writer = Path(), "", None
        self._sums = ForkedResults()

    def start(self, request: AsyncRequest, path: Path, name: str, rank: int) -> None:
        """Have a fork write this rank's files of ``request`` into ``path``. Collective."""
        self._path, self._name, self._sums = path, name, ForkedResults()
        if request.async_fn is not None:
            request = request._replace(async_fn=partial(_write_and_sum, request.async_fn, self._sums, path, rank))
        self.schedule_async_request(request)
        self._writer = self.async_calls[-1].async_caller.process  # None on a rank that has nothing to write

    def sums(self) -> dict[str, FileSum]:
        """Of the files that this rank has written."""
        with contextlib.suppress(queue.Empty):  # of a rank that had nothing to write
            return self._sums.get_nowait()
        return {}

    def finish(self, wait: bool) -> None:
        """Complete what is being written; with ``wait`` False only if every rank is done. Collective.

        RuntimeError on the rank whose writer died; on all ranks what `disk_errors` makes of a full disk.
        """
        written = -1
        while self.get_num_unfinalized_calls():
            self._check()
            try:
                self.maybe_finalize_async_calls(blocking=False)
            except Exception:
                self._check()  # the writer died just now: that is why
                raise
            except CheckpointException as error:  # on all ranks, of which one knows why
                self._check()
                self._fail(error)
            if not wait or not self.get_num_unfinalized_calls():
                return
            if (size := self._size()) != written:
                written = size
                beat("checkpoint", f"{self._name}, of which {size} bytes are written")
            time.sleep(POLL_SECONDS)

    def _check(self) -> None:
        code = self._writer.exitcode if self._writer is not None else None
        if code:
            died = f"was killed by signal {-code}" if code < 0 else "failed"
            with contextlib.suppress(queue.Empty):
                if isinstance(said := self._sums.get_nowait(), str):
                    died = said
            raise RuntimeError(
                f"a process that wrote {self._name} {died}; the kernel kills one of these first when memory is short. "
                "The checkpoint before it is what counts"
            )

    def _fail(self, error: CheckpointException) -> None:
        """Collective."""
        known: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(known, "; ".join(str(cause) for cause, _ in error.failures.values()))
        why = "; ".join(filter(None, known))
        if number := re.search(r"\[Errno (\d+)\]", why):
            with disk_errors(self._path):
                raise OSError(int(number[1]), os.strerror(int(number[1])), str(self._path)) from error
        raise RuntimeError(f"{self._name} could not be written: {why}") from error

    def _size(self) -> int:
        with contextlib.suppress(OSError):  # it has just been renamed
            return sum(file.stat().st_size for file in self._path.iterdir())
        return 0


def _write_and_sum(write: Callable[..., None], sums: ForkedResults, path: Path, rank: int, *arguments: Any) -> None:
    """In a forked process: write this rank's files, then sum them up, which takes no time from training."""
    written = threading.Event()
    threading.Thread(target=_watch, args=(sums, written), daemon=True).start()
    filesystem_async._write_item = _with_causes(filesystem_async._write_item)
    write(*arguments)
    written.set()
    sums.put({file.name: FileSum.of(file) for file in path.glob(f"__{rank}_*.distcp")})


def _with_causes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of torch's errors about files ("unexpected pos 704 vs 598") the system's, such as that of a full disk."""

    @wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None

    return wrapped


def _watch(sums: ForkedResults, written: threading.Event) -> None:
    """In a thread of a forked process: Megatron would wait for its own forks even when they are dead.

    No handler of SIGCHLD does that, since Python runs it only once what the main thread waits for has come.
    """
    while not written.wait(POLL_SECONDS):
        _end_if_one_died(sums)


def _end_if_one_died(sums: ForkedResults) -> None:
    """The process ends at once, since a dead fork may have held a lock that leaving in order would need."""
    for child in psutil.Process().children():
        with contextlib.suppress(ChildProcessError):  # waited for meanwhile
            ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None and ended.si_status:
                killed = ended.si_code != os.CLD_EXITED
                sums.put(f"was killed by signal {ended.si_status}" if killed else "failed")
                os._exit(1)
