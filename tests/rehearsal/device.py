"""Gives torch CUDA devices that are host memory, in its CPU build and in CUDA builds. For tests; never installed.

The compiled part (`csrc/`) runs every operator of the dispatch key CUDA by its CPU kernel on the same bytes. This
module gives ``torch._C`` what it has in a CUDA build, so that ``torch.cuda`` and ``torch.distributed`` are torch's own.
A process gets the device before it imports torch, through `tests/rehearsal/site` on ``PYTHONPATH``.

As on a GPU, new memory holds no zeros (but NaN), devices must not be mixed, a fork cannot use CUDA that its parent has
initialised, and "nccl" takes only CUDA tensors. What a collective or a copy to pinned memory writes is NaN until
somebody waits for it, and what it reads must not change until then. Unlike on a GPU, kernels are done when they are
submitted, so a missing wait of one stream for another does not show.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import signal
import sys
import threading
import time
import types
from typing import Any

import torch
import torch.version

from tests.rehearsal.build import DEVICE, build

NAME = "rehearsal H100"
TOTAL_MEMORY = 80 << 30
NCCL_POLL_SECONDS = 1.0  # TORCH_NCCL_COORD_CHECK_MILSEC


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("megarl_rehearsal_device", build() / DEVICE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


lib = _load()
_initialised_by: list[int] = []  # process ids
_watched_by: list[int] = []  # process ids


class _Stream:
    """``torch._C._CudaStreamBase``"""

    def __new__(cls, priority: int = 0, stream_id: int = 0, device_index: int = 0, device_type: int = 1, **_: Any):
        stream = super().__new__(cls)
        stream.priority, stream.stream_id, stream.device_type = priority, stream_id, device_type
        stream.device_index, stream.cuda_stream = device_index, stream_id
        stream.device = torch.device("cuda", device_index)
        return stream

    def query(self) -> bool:
        lib.finish_copies()
        return True

    def synchronize(self) -> None:
        lib.waited("synchronize")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and self.stream_id == other.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)


class _Event:
    """``torch._C._CudaEventBase``"""

    def __new__(cls, *_: Any, **__: Any):
        return super().__new__(cls)

    def record(self, stream: Any) -> None: ...
    def wait(self, stream: Any) -> None: ...

    def query(self) -> bool:
        lib.finish_copies()
        return True

    def elapsed_time(self, end: Any) -> float:
        return 1.0

    def synchronize(self) -> None:
        lib.waited("synchronize")


def _properties(device: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=NAME,
        major=9,
        minor=0,
        total_memory=TOTAL_MEMORY,
        multi_processor_count=132,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448,
        shared_memory_per_multiprocessor=233472,
        regs_per_multiprocessor=65536,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        is_integrated=False,
        gcnArchName="",
        L2_cache_size=50 << 20,
        uuid="rehearsal",
    )


def _init() -> None:
    if lib.device_count() == 0:
        raise RuntimeError("No CUDA GPUs are available")
    if not _initialised_by:
        os.register_at_fork(after_in_child=lib.forget_initialisation)  # a fork tries again, and is refused
    _initialised_by.append(os.getpid())
    generators = [lib.default_generator(i) for i in range(lib.device_count())]
    torch.cuda.default_generators = tuple(generators)
    torch.cuda._get_device_properties = _properties


def _memory_stats(device: int) -> dict[str, Any]:
    current, peak = lib.memory(device)
    numbers = {"current": current, "peak": peak, "allocated": current, "freed": 0}
    names = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
    return {name: {"all": dict(numbers)} for name in names} | {"num_alloc_retries": 0, "num_ooms": 0}


def _exchange(index: int) -> int:
    before = lib.current_device()
    if index >= 0:
        lib.set_current_device(index)
    return before


class _Runtime(types.SimpleNamespace):
    """``torch._C._cudart``"""

    class cudaError:
        success = 0

    def cudaMemGetInfo(self, device: int) -> tuple[int, int]:
        return TOTAL_MEMORY - lib.memory(device)[0], TOTAL_MEMORY

    def cudaGetErrorString(self, code: int) -> str:
        return f"error {code}"

    def cudaProfilerStart(self) -> int:
        return 0

    cudaProfilerStop = cudaProfilerStart


def _nothing(*_: Any, **__: Any) -> int:
    return 0


def _answers() -> dict[str, Any]:
    """What ``torch._C`` has in a CUDA build and not in a CPU build."""
    nothing = {
        "_cuda_setStream", "_cuda_emptyCache", "_cuda_ipc_collect", "_cuda_getCurrentBlasHandle",
        "_cuda_getCurrentRawStream", "_cuda_setMemoryFraction", "_cuda_resetAccumulatedMemoryStats",
        "_cuda_clearCublasWorkspaces", "_cuda_lock_mutex", "_cuda_unlock_mutex",
    }  # fmt: skip
    return {
        "_has_cuda": True,
        "_cudart": _Runtime(),
        "_CudaStreamBase": _Stream,
        "_CudaEventBase": _Event,
        "_CudaDeviceProperties": types.SimpleNamespace,
        "_CUDAGraph": type("_CUDAGraph", (), {}),
        "_graph_pool_handle": _nothing,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_isInBadFork": lambda: bool(_initialised_by) and _initialised_by[-1] != os.getpid(),
        "_cuda_init": _init,
        "_cuda_getDeviceCount": lib.device_count,
        "_cuda_getDevice": lib.current_device,
        "_cuda_setDevice": lib.set_current_device,
        "_cuda_exchangeDevice": _exchange,
        "_cuda_maybeExchangeDevice": _exchange,
        "_cuda_canDeviceAccessPeer": lambda *_: True,
        "_cuda_getArchFlags": lambda: "sm_80 sm_90 sm_100",
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_synchronize": lambda: lib.waited("synchronize"),
        "_cuda_memoryStats": _memory_stats,
        "_cuda_resetPeakMemoryStats": lib.reset_peak,
        "_nccl_version": lambda: 2 << 32 | 27 << 16 | 3,
        "_nccl_version_suffix": lambda: b"",
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_set_sync_debug_mode": lib.set_sync_mode,
        "_cuda_get_sync_debug_mode": lib.sync_mode,
        "_nvtx": types.SimpleNamespace(
            rangePushA=_nothing, rangePop=_nothing, markA=_nothing, rangeStartA=_nothing, rangeEnd=_nothing
        ),
        **dict.fromkeys(("_cuda_getCurrentStream", "_cuda_getDefaultStream"), lambda *_: (0, lib.current_device(), 1)),
        **dict.fromkeys(nothing, _nothing),
    }  # fmt: skip


def install() -> None:
    """Called before ``torch.cuda`` is imported: see `tests.rehearsal.hooks`."""
    torch.version.cuda = "13.0"
    for name, answer in _answers().items():
        setattr(torch._C, name, answer)


def _end_after_an_error(store: Any) -> None:
    """What ProcessGroupNCCL's monitor does in a process's first group: another rank's error ends this process.

    torch then also waits for its dump to be written; the key is in `csrc/nccl.h`."""
    while True:
        try:
            failed = store.check(["exception_dump"])
        except Exception:  # the store has gone, and with it the ranks that could report
            return
        if failed:
            print("ProcessGroupNCCL's monitor: a rank has reported an error", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGABRT)
        time.sleep(NCCL_POLL_SECONDS)


def define_nccl() -> None:
    """Called before ``torch.distributed.distributed_c10d`` is imported, which then finds NCCL."""
    from torch._C import _distributed_c10d as c10d

    lib.define_nccl(c10d)

    class Options:
        """``ProcessGroupNCCL.Options``"""

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = types.SimpleNamespace()

    base = c10d.RehearsalNCCL

    class ProcessGroupNCCL(base):
        def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
            gloo = c10d.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
            super().__init__(gloo, store, rank, size)
            if not _watched_by or _watched_by[-1] != os.getpid():
                _watched_by.append(os.getpid())
                below = store._underlying_non_prefix_store if isinstance(store, c10d.PrefixStore) else store
                threading.Thread(target=_end_after_an_error, args=(below,), daemon=True).start()

    c10d._DEFAULT_PG_NCCL_TIMEOUT = datetime.timedelta(minutes=10)
    ProcessGroupNCCL.Options = Options
    c10d.ProcessGroupNCCL = ProcessGroupNCCL
