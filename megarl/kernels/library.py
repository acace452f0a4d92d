"""Finds and loads the compiled kernels (`csrc/`, plain C ABI) of the installed megarl distribution."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
from pathlib import Path

from megarl.errors import UserError

ABI_VERSION = 1  # MEGARL_ABI_VERSION of csrc/include/megarl_kernels.h

_REMEDY = {
    "cpu": "install megarl where a C++ compiler is at hand: pip install .",
    "cuda": "install megarl where nvcc is on PATH: pip install . -C cmake.define.MEGARL_CUDA=ON",
}
_CODES = {1: "cu_seqlens must start at 0 and never decrease"}
_CUDA_ERROR = 100


def find_library(device: str) -> Path | None:
    """Where the compiled kernels for ``cpu`` or ``cuda`` lie, None if they are not installed.

    The path comes from the distribution's metadata: in an editable installation the libraries do not lie beside
    the Python sources.
    """
    try:
        distribution = importlib.metadata.distribution("megarl")
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(f"megarl/kernels/lib/libmegarl_{device}.so")))
    return path if path.exists() else None


@functools.cache
def load_library(device: str) -> ctypes.CDLL:
    """The compiled kernels for ``cpu`` or ``cuda``; `UserError` with the remedy where they are missing or outdated."""
    path = find_library(device)
    if path is None:
        raise UserError(f"the compiled {device} kernels are not installed; {_REMEDY[device]}")
    library = ctypes.CDLL(str(path))
    version = library.megarl_abi_version()
    if version != ABI_VERSION:
        raise UserError(f"{path} has ABI version {version}, but megarl needs {ABI_VERSION}; {_REMEDY[device]}")
    return library


def check(code: int, function: str) -> None:
    """Raise for a non-zero return code of a kernel."""
    if code in _CODES:
        raise ValueError(f"{function}: {_CODES[code]}")
    if code:
        raise RuntimeError(f"{function} failed with CUDA error {code - _CUDA_ERROR}")
