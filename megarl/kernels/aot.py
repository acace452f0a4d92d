"""Ahead-of-time compilation of the Triton kernels, on any machine: registers, shared memory and spills of each.

A module ``triton_backend.py`` of an op lists the ways in which it launches its kernels in `COMPILE_SPECS`. Triton
brings the compiler of machine code (ptxas) and the tool that reads it (cuobjdump).
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import megarl.kernels

SHARED_MEMORY = {80: 163, 90: 227, 100: 227}  # KiB a block may use, by architecture: CUDA C++ programming guide


@dataclass(frozen=True)
class CompileSpec:
    """One way to launch a kernel: what the just-in-time compiler would derive from the arguments of that launch.

    signature: a Triton type (``*bf16``, ``i32``, ``tensordesc<bf16[128, 64]>``) for each argument that is no constexpr.
    aligned: the arguments (pointers, integers) that 16 divides; without it there are no 128-bit loads.
    """

    name: str  # of the launch: kernel, dtype, variant
    kernel: Any  # what @triton.jit made
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    architecture: int  # 80, 90, 100: sm_80, sm_90, sm_100
    aligned: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)  # of the launch: num_warps, num_stages, enable_fp_fusion


@dataclass(frozen=True)
class Resources:
    """What the machine code of one kernel needs, and a few of its instructions counted."""

    registers: int  # a thread
    shared_bytes: int  # a block
    stack_bytes: int  # a thread; local memory: spilled registers or arrays that are indexed at run time
    spills: int  # loads and stores of local memory
    matrix_instructions: int
    wide_loads: int  # global memory, 128 bits a thread, or a tile through the tensor memory accelerator


def compile_specs() -> list[CompileSpec]:
    """Those of every Triton module of megarl; `AttributeError` for a module without `COMPILE_SPECS`."""
    modules = [module.name for module in pkgutil.walk_packages(megarl.kernels.__path__, "megarl.kernels.")]
    triton_modules = [name for name in modules if name.endswith(".triton_backend")]
    return [spec for name in triton_modules for spec in importlib.import_module(name).COMPILE_SPECS]


def resources(spec: CompileSpec) -> Resources:
    """Compile to machine code and measure; Triton's error where it cannot be compiled."""
    kernel = spec.kernel if hasattr(spec.kernel, "arg_names") else spec.kernel.fn
    names = kernel.arg_names
    signature = {name: spec.signature.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in spec.aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=dict(spec.constants), attrs=attributes)
    target = GPUTarget("cuda", spec.architecture, 32)
    compiled = triton.compile(source, target=target, options=dict(spec.options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = _cuobjdump("--dump-resource-usage", cubin.name)
        code = _cuobjdump("-sass", cubin.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage

    def count(pattern: str) -> int:
        return len(re.findall(rf"\s{pattern}\b", code))

    return Resources(
        registers=int(found[1]),
        shared_bytes=compiled.metadata.shared,
        stack_bytes=int(found[2]),
        spills=count(r"(?:LDL|STL)(?:\.[\w.]+)?"),
        matrix_instructions=count(r"(?:HGMMA|HMMA|UTC\w*MMA)(?:\.[\w.]+)?"),
        wide_loads=count(r"(?:LDG|LDGSTS)\.[\w.]*128") + count(r"UTMALDG(?:\.[\w.]+)?"),
    )


def _cuobjdump(option: str, path: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, option, path], check=True, capture_output=True, text=True).stdout
