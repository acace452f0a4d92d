"""Every Triton kernel compiled for the GPUs megarl targets, without one: nothing may spill, and it must fit."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from typing import Any

import pytest
from megarl.kernels.aot import SHARED_MEMORY, compile_specs, resources
from triton.runtime.jit import JITFunction

import megarl.kernels

SPECS = compile_specs()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"sm_{spec.architecture} {spec.name}")
def test_no_spills_and_no_stack(spec: Any) -> None:
    used = resources(spec)
    assert used.spills == 0 and used.stack_bytes == 0, used
    assert used.shared_bytes <= SHARED_MEMORY[spec.architecture] * 1024, used


def test_every_kernel_is_compiled_for_every_architecture() -> None:
    """A kernel is what its module launches: by convention its name ends with _kernel."""
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


def test_spills_are_seen() -> None:
    """The check above can fail: the same kernel with too few registers."""
    spec = next(s for s in SPECS if s.architecture == 80 and "statistics" in s.name)
    used = resources(replace(spec, options=spec.options | {"maxnreg": 64}))
    assert used.registers <= 64 and used.spills > 0 and used.stack_bytes > 0


def test_matrix_units_and_wide_loads_are_used() -> None:
    """Half precision goes through the matrix units, and operands come 128 bits or a tile at a time."""
    for spec in SPECS:
        if spec.name in ("linear_logprob.statistics bf16", "linear_logprob.logit_gradients bf16"):
            used = resources(spec)
            assert used.matrix_instructions > 0 and used.wide_loads > 0, spec
