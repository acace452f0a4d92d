"""Writes a checkpoint in a thread of the rank while training goes on.

Megatron-Core forks a process on each rank for this (0.16: which forks further ones). Here these are threads: a fork
shares pinned memory with its parent, which training overwrites, and Megatron waits for ever for a fork that is killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing.dummy
import os
import re
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint import CheckpointException

from megarl.heartbeats import beat
from megarl.storage.checkpoints import FileSum
from megarl.storage.files import disk_errors

POLL_SECONDS = 0.02

# `multiprocessing.dummy` has threads with the interface of processes
async_utils.mp = filesystem_async.mp = SimpleNamespace(get_context=lambda method: multiprocessing.dummy)
_write_item = filesystem_async._write_item


class Saving(AsyncCallsQueue):
    """The checkpoint that this rank is writing in the background, if any."""

    def __init__(self) -> None:
        super().__init__()
        self._path, self._name = Path(), ""
        self._causes: list[BaseException] = []  # errors of the system while this rank wrote
        self.sums: dict[str, FileSum] = {}  # checksums of the files that this rank has written, by file name
        self.strategy = TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)

    def start(self, request: AsyncRequest, path: Path, name: str, rank: int) -> None:
        """Have a thread write this rank's files into ``path``. Collective.

        request: Megatron's description of what to write. name: of the checkpoint, for messages."""
        self._path, self._name, self._causes, self.sums = path, name, [], {}
        if request.async_fn is not None:  # this rank has something to write
            filesystem_async._write_item = _with_causes(_write_item, self._causes)
            copy = partial(_copy, request.async_fn_args[1])
            request = request._replace(async_fn=partial(self._write, request.async_fn, rank), preload_fn=copy)
        self.schedule_async_request(request)

    def _write(self, write: Callable[..., None], rank: int, *arguments: Any) -> None:
        """In the thread: write this rank's files, then compute their checksums, so that training does not wait."""
        write(*arguments)
        self.sums = {file.name: FileSum.of(file) for file in self._path.glob(f"__{rank}_*.distcp")}

    def finish(self, wait: bool) -> None:
        """Complete the checkpoint being written, if any; without ``wait`` only if every rank is done. Collective.

        Raises on all ranks if writing failed: the error of `disk_errors` for errors of the system such as a full disk,
        else RuntimeError.
        """
        written = -1
        while self.get_num_unfinalized_calls():
            try:
                self.maybe_finalize_async_calls(blocking=False)
            except CheckpointException as error:  # raised on all ranks; only the failing one knows the cause
                self._fail(error)
            if not wait or not self.get_num_unfinalized_calls():
                return
            if (size := self._size()) != written:
                written = size
                beat("checkpoint", f"{self._name}, {size} bytes written")
            time.sleep(POLL_SECONDS)

    def _fail(self, error: CheckpointException) -> None:
        """Raise the error of the rank that failed, on all ranks. Collective."""
        known: list[str] = [""] * dist.get_world_size()
        causes = self._causes or [cause for cause, _ in error.failures.values()]
        dist.all_gather_object(known, "; ".join(map(str, causes)))
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


def _copy(buckets: list[Any]) -> list[Any]:
    """Replace the tensors in Megatron's list of what to write by copies in host memory, also of those that are there
    already: training goes on to change them."""
    for _, _, (_, tensors) in buckets:
        for place, (item, tensor) in enumerate(tensors):
            tensors[place] = item, tensor.to("cpu", non_blocking=True, copy=True)
    return buckets


def _with_causes(function: Callable[..., Any], causes: list[BaseException]) -> Callable[..., Any]:
    """Decorator: for an error of torch about a file ("unexpected pos 704 vs 598") raise its cause, the system's error,
    such as that of a full disk, and add it to ``causes``. (Megatron-Core 0.19 reports the type of an error alone.)"""

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
