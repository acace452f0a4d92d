"""Finds, loads and calls the compiled kernels (`csrc/`, plain C ABI) of the installed megarl distribution."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import torch

from megarl import compiled_file
from megarl.errors import UserError

ABI_VERSION = 7  # MEGARL_ABI_VERSION of csrc/include/megarl_kernels.h

BAD_BOUNDARIES, UNKNOWN_RULE, CUDA_ERROR = 1, 2, 100  # return codes of the same header; 100 + e: cudaError_t e

_REMEDY = {
    "cpu": "install megarl again on a machine with a C++ compiler: pip install .",
    "cuda": "install megarl again with nvcc on PATH: pip install . -C cmake.define.MEGARL_CUDA=ON",
}
_MESSAGES = {
    BAD_BOUNDARIES: "cu_seqlens must start at 0 and never decrease",
    UNKNOWN_RULE: "the compiled kernels do not know this objective's rule",
}


def find_library(device: str) -> Path | None:
    """Path of the compiled kernels for ``cpu`` or ``cuda``, None if they are not installed."""
    return compiled_file(f"kernels/lib/libmegarl_{device}.so")


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


def triton_lacks() -> str | None:
    """What Triton lacks on this machine to run kernels, with the remedy, as a message; None if nothing.

    When its first kernel runs, Triton compiles a driver in C against Python's headers (triton/runtime/build.py).
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "triton needs a C compiler when it runs: install gcc or clang, or set CC"
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").exists():
        return f"triton needs Python's headers when it runs, but {include} has no Python.h: install python3-dev"
    return None


def rule_digest(device: str, rule: str) -> str | None:
    """`RuleFunction.digest` of the rule of that name when the token pass for ``cpu`` or ``cuda`` was built; None: the
    token pass has no such rule."""
    find = load_library(device).megarl_rule_digest
    find.restype = ctypes.c_char_p
    found: bytes | None = find(rule.encode())
    return None if found is None else found.decode()


class TokenPointers(ctypes.Structure):
    """``megarl_tokens`` of the header. Keep the tensors alive while a kernel may read them."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("logprobs", "rollout", "old", "advantages", "mask", "cu_seqlens")),
        ("num_segments", ctypes.c_int64),
    ]


def call(name: str, device: torch.device, *arguments: Any) -> None:
    """Call ``megarl_<name>_<device>``. Tensors become pointers, structures are passed by reference, a str becomes a C
    string, an int int64_t, a float double, None NULL. CUDA functions get the current stream as last argument. Raises
    ValueError or RuntimeError for what the function returns."""
    converted: list[Any] = [_convert(a) for a in arguments]
    function = getattr(load_library(device.type), f"megarl_{name}_{device.type}")
    if device.type == "cuda":
        with torch.cuda.device(device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            code = function(*converted, stream)
    else:
        code = function(*converted)
    if code in _MESSAGES:
        raise ValueError(f"{name}: {_MESSAGES[code]}")
    if code:
        raise RuntimeError(f"{name} failed with CUDA error {code - CUDA_ERROR}")


def _convert(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        if not argument.is_contiguous():
            raise ValueError(f"kernels need contiguous tensors, but one of shape {tuple(argument.shape)} is not")
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, ctypes.Structure):
        return ctypes.byref(argument)
    if isinstance(argument, float):
        return ctypes.c_double(argument)
    if isinstance(argument, str):
        return ctypes.c_char_p(argument.encode())
    if argument is None:
        return ctypes.c_void_p(None)
    return ctypes.c_int64(argument) if isinstance(argument, int) else argument
