"""Installs the rehearsal device when a process imports torch, so that a process without torch need not import it.

See `tests.rehearsal.device`.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable
from typing import Any

# Without a GPU nothing could run what torch.compile makes for one.
os.environ["TORCHDYNAMO_DISABLE"] = "1"


def _before_torch() -> None:
    import ctypes

    from tests.rehearsal.build import DEVICE, build

    ctypes.CDLL(str(build() / DEVICE))  # torch asks once, and early, whether there is such a device


def _before_torch_cuda() -> None:
    from tests.rehearsal import device

    device.install()


def _before_distributed() -> None:
    from tests.rehearsal import device

    device.define_nccl()


def _after_torch(_: Any) -> None:
    from tests.rehearsal import cuda_only

    cuda_only.define()


def _after_library(library: Any) -> None:
    from tests.rehearsal.build import CUDA_KERNELS, build

    find_library = library.find_library
    library.find_library = lambda device: build() / CUDA_KERNELS if device == "cuda" else find_library(device)


def _after_triton(_: Any) -> None:
    if interpreter := sys.modules.get("triton.runtime.interpreter"):  # TRITON_INTERPRET=1
        from tests.rehearsal import triton_interpreter

        triton_interpreter.mend(interpreter)


BEFORE: dict[str, Callable[[], None]] = {
    "torch": _before_torch,
    "torch.cuda": _before_torch_cuda,
    "torch.distributed.distributed_c10d": _before_distributed,
}
AFTER: dict[str, Callable[[Any], None]] = {
    "torch": _after_torch,
    "megarl.kernels.library": _after_library,
    "triton": _after_triton,
}


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name not in BEFORE and name not in AFTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                BEFORE.get(name, lambda: None)()
                execute(module)
                AFTER.get(name, lambda _: None)(module)

            spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
