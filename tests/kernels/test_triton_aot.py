"""Every Triton kernel, compiled for its architectures without a GPU, must not spill and must fit into shared memory."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
from dataclasses import replace
from typing import Any

import pytest
import triton
from triton.runtime.jit import JITFunction

import megarl.kernels
from tests.kernels.benchmark import load_benchmark

benchmark = load_benchmark("triton_resources")
SPECS, SHARED_MEMORY, resources = benchmark.SPECS, benchmark.SHARED_MEMORY, benchmark.resources


@functools.cache
def compiled(index: int) -> Any:
    """The resources of SPECS[index], compiled once for all tests."""
    return resources(SPECS[index])


@pytest.mark.parametrize("index", range(len(SPECS)), ids=lambda i: f"sm_{SPECS[i].architecture} {SPECS[i].name}")
def test_no_spills_no_stack_and_enough_shared_memory_and_registers(index: int) -> None:
    """Two blocks of the token pass, or one of another kernel, fit into a multiprocessor's 65536 registers on sm_90.

    `make test-slow WHAT=triton` says which version of Triton it expects.
    """
    assert triton.__version__ == os.environ.get("MEGARL_TRITON", triton.__version__)
    spec, used = SPECS[index], compiled(index)
    assert used.spills == 0 and used.stack_bytes == 0, used
    assert used.shared_bytes <= SHARED_MEMORY[spec.architecture] * 1024, used
    if spec.architecture == 90:
        blocks = 2 if spec.name.startswith("token_pass") else 1
        assert used.registers <= spec.options.get("maxnreg", 255)
        assert blocks * used.registers * 32 * spec.options["num_warps"] <= 65536


def test_every_kernel_is_compiled_for_every_architecture() -> None:
    """The names of kernels, and of nothing else, end with _kernel."""
    found = {
        (module.name, name)
        for module in pkgutil.walk_packages(megarl.kernels.__path__, "megarl.kernels.")
        if ".triton_" in module.name
        for name, value in vars(importlib.import_module(module.name)).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel") and value.fn.__module__ == module.name
    }
    assert found
    for architecture in SHARED_MEMORY:
        compiled = {(s.kernel.fn.__module__, s.kernel.fn.__name__) for s in SPECS if s.architecture == architecture}
        assert compiled == found


def test_spills_are_detected() -> None:
    """The check above can fail: a kernel that may use too few registers spills."""
    spec = next(s for s in SPECS if s.architecture == 80 and "statistics" in s.name)
    used = resources(replace(spec, options=spec.options | {"maxnreg": 64}))
    assert used.registers <= 64 and used.spills > 0 and used.stack_bytes > 0


def test_matrix_units_and_wide_loads_are_used() -> None:
    """The lm head multiplies bfloat16 on the matrix units and loads 128 bits or a tile at a time."""
    names = ("linear_logprob.statistics bf16", "linear_logprob.logit_gradients bf16")
    found = {(spec.architecture, spec.name): compiled(i) for i, spec in enumerate(SPECS) if spec.name in names}
    assert found.keys() == {(architecture, name) for architecture in SHARED_MEMORY for name in names}
    assert all(used.matrix_instructions > 0 and used.wide_loads > 0 for used in found.values()), found
