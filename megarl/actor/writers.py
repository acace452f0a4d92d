"""The forked processes that write a checkpoint while training goes on, and the error when one of them dies.

Megatron-Core 0.16 forks one process on each rank, the writer, which forks further ones to write the files (0.19 uses
threads for these). If one of the latter is killed, Megatron's writer waits for ever; if the writer dies, Megatron does
not say why. Both happen when memory is short, since the kernel kills such processes first.
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
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint import CheckpointException

from megarl.heartbeats import beat
from megarl.storage.checkpoints import FileSum
from megarl.storage.files import disk_errors

POLL_SECONDS = 0.02


class ForkedResults:
    """A queue from the forked writers of one checkpoint to their rank: a temporary file that both have open.

    It has the interface of Megatron's own queue, which is served by another process that would outlive a killed rank. A
    pipe would fill up, since it is read only after the writers have ended.
    """

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - stays open, since the writers inherit it

    def put(self, results: Any) -> None:
        pickle.dump(results, self.file)
        self.file.flush()

    def get_nowait(self) -> Any:
        """The first results that were put, or `queue.Empty`; discards everything in the file."""
        self.file.seek(0)
        try:
            results = pickle.load(self.file)
        except EOFError as error:
            raise queue.Empty from error
        self.file.seek(0)
        self.file.truncate()
        return results


class Saving(AsyncCallsQueue):
    """The checkpoint that this rank is writing in the background, if any."""

    def __init__(self) -> None:
        super().__init__()
        self._path, self._name, self._writer = Path(), "", None
        self._sums = ForkedResults()
        self.strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
        self._staged: Any = None  # the copy in host memory that the writer reads

    def start(self, request: AsyncRequest, path: Path, name: str, rank: int) -> None:
        """Have a forked process write this rank's files into ``path``. Collective.

        request: Megatron's description of what to write. name: of the checkpoint, for messages."""
        self._path, self._name, self._sums = path, name, ForkedResults()
        if request.async_fn is not None:
            request = request._replace(async_fn=partial(_write_and_sum, request.async_fn, self._sums, path, rank))
        if request.preload_fn is not None:
            request = request._replace(preload_fn=partial(self._stage, request.preload_fn))
        self.schedule_async_request(request)
        self._writer = self.async_calls[-1].async_caller.process  # None on a rank that has nothing to write

    def _stage(self, copy: Callable[[], Any]) -> Any:
        """Copy the state to the host and keep the copy until it is written.

        Megatron-Core 0.16 drops it once it has forked. But a fork shares pinned memory with its parent, whose next
        uploads would be written in place of the state (NVIDIA/Megatron-LM#2288).
        """
        self._staged = copy()
        return self._staged

    def sums(self) -> dict[str, FileSum]:
        """Checksums of the files that this rank has written, by file name."""
        with contextlib.suppress(queue.Empty):  # the rank had nothing to write
            return self._sums.get_nowait()
        return {}

    def finish(self, wait: bool) -> None:
        """Complete the checkpoint being written, if any; without ``wait`` only if every rank is done. Collective.

        Raises RuntimeError on the rank whose writer died, and on all ranks if writing failed: then the error of
        `disk_errors` for errors of the system such as a full disk, else RuntimeError.
        """
        written = -1
        while self.get_num_unfinalized_calls():
            self._check()
            try:
                self.maybe_finalize_async_calls(blocking=False)
            except Exception:
                self._check()  # if the writer has just died, that is the cause, and the better message
                raise
            except CheckpointException as error:  # raised on all ranks; only the failing one knows the cause
                self._check()
                self._fail(error)
            if not self.get_num_unfinalized_calls():
                self._staged = None
                return
            if not wait:
                return
            if (size := self._size()) != written:
                written = size
                beat("checkpoint", f"{self._name}, {size} bytes written")
            time.sleep(POLL_SECONDS)

    def _check(self) -> None:
        """RuntimeError if this rank's writer has died."""
        code = self._writer.exitcode if self._writer is not None else None
        if code:
            died = f"was killed by signal {-code}" if code < 0 else "failed"
            with contextlib.suppress(queue.Empty):
                if isinstance(reported := self._sums.get_nowait(), str):
                    died = reported
            raise RuntimeError(
                f"a process that wrote the checkpoint {self._name} {died} (when memory is short, the kernel kills such "
                "a process first). The checkpoint is incomplete; a restart continues from the one before it"
            )

    def _fail(self, error: CheckpointException) -> None:
        """Raise the error of the rank that failed, on all ranks. Collective."""
        known: list[str] = [""] * dist.get_world_size()
        mine = "; ".join(str(cause) for cause, _ in error.failures.values())
        with contextlib.suppress(queue.Empty):
            if isinstance(reported := self._sums.get_nowait(), str):
                mine = reported
        dist.all_gather_object(known, mine)
        why = "; ".join(filter(None, known))
        if number := re.search(r"\[Errno (\d+)\]", why):
            with disk_errors(self._path):
                raise OSError(int(number[1]), os.strerror(int(number[1])), str(self._path)) from error
        raise RuntimeError(f"the checkpoint {self._name} could not be written: {why}") from error

    def _size(self) -> int:
        """Bytes written so far by all ranks, 0 if unknown."""
        with contextlib.suppress(OSError):  # the directory has just been renamed
            return sum(file.stat().st_size for file in self._path.iterdir())
        return 0


def _write_and_sum(write: Callable[..., None], sums: ForkedResults, path: Path, rank: int, *arguments: Any) -> None:
    """In a forked process: write this rank's files, then compute their checksums, so that training does not wait."""
    torch.set_num_threads(1)  # a fork has none of the threads of the rank, and OpenMP would wait for them for ever
    written = threading.Event()
    threading.Thread(target=_watch, args=(sums, written), daemon=True).start()
    causes: list[BaseException] = []
    filesystem_async._write_item = _with_causes(filesystem_async._write_item, causes)
    write(*arguments)
    written.set()
    # 0.19 reports the type of an error alone
    sums.put(str(causes[0]) if causes else {x.name: FileSum.of(x) for x in path.glob(f"__{rank}_*.distcp")})


def _with_causes(function: Callable[..., Any], causes: list[BaseException]) -> Callable[..., Any]:
    """Decorator: for an error of torch about a file ("unexpected pos 704 vs 598") raise its cause, the system's error,
    such as that of a full disk, and add it to ``causes``."""

    @wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            causes.append(cause or error)
            raise causes[-1] from None

    return wrapped


def _watch(sums: ForkedResults, written: threading.Event) -> None:
    """In a thread of a forked process: end the process if one of its own forks dies, for which Megatron would wait.

    A handler of SIGCHLD cannot do this: Python runs it only after the main thread's wait, which never ends.
    """
    while not written.wait(POLL_SECONDS):
        _end_if_one_died(sums)


def _end_if_one_died(sums: ForkedResults) -> None:
    """Report a dead fork and end this process at once: the fork may have held a lock that an orderly exit needs."""
    for child in psutil.Process().children():
        with contextlib.suppress(ChildProcessError):  # Megatron has waited for it in the meantime
            ended = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None and ended.si_status:
                killed = ended.si_code != os.CLD_EXITED
                sums.put(f"was killed by signal {ended.si_status}" if killed else "failed")
                os._exit(1)
