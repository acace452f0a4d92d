"""Registers, shared memory, spills and wide loads of the Triton kernels, by architecture. Needs no GPU.

    python benchmarks/triton_resources.py

Every way in which megarl launches a kernel is a `CompileSpec`, which Triton compiles ahead of time. Triton includes the
assembler (ptxas) and the tool that reads its machine code (cuobjdump).
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from common import write_table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import megarl.objectives  # noqa: F401  # they have the rules
from megarl.kernels.linear_logprob.triton_backend import Tile, launch_options, logit_gradients_kernel, statistics_kernel
from megarl.kernels.row_sums import triton_backend as row_sums
from megarl.kernels.token_pass.language import RULES
from megarl.kernels.token_pass.triton_backend import LAUNCH_OPTIONS, kernel_constants, token_pass_kernel
from megarl.kernels.weight_gradient import triton_backend as weight_gradient
from megarl.kernels.weighted_glu import Glu
from megarl.kernels.weighted_glu.triton_backend import LAUNCH_OPTIONS as GLU_OPTIONS
from megarl.kernels.weighted_glu.triton_backend import constants, weighted_glu_gradients_kernel, weighted_glu_kernel

SHARED_MEMORY = {80: 163, 90: 227, 100: 227}  # KiB a block may use, by architecture: CUDA C++ programming guide


@dataclass(frozen=True)
class CompileSpec:
    """One way to launch a kernel, with the facts that the just-in-time compiler would derive from its arguments.

    signature: a Triton type (``*bf16``, ``i32``, ``tensordesc<bf16[128, 64]>``) for each argument that is not
    constexpr. aligned: the arguments (pointers, integers) that are multiples of 16; only these allow 128-bit loads.
    """

    name: str  # kernel, dtype and variant, for the table
    kernel: Any  # a function decorated by @triton.jit
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    architecture: int  # 80, 90, 100: sm_80, sm_90, sm_100
    aligned: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)  # of the launch: num_warps, num_stages, enable_fp_fusion


@dataclass(frozen=True)
class Resources:
    """Resources that the machine code of one kernel needs, and counts of some of its instructions."""

    registers: int  # per thread
    shared_bytes: int  # per block
    stack_bytes: int  # per thread: local memory for spilled registers or arrays that are indexed at run time
    spills: int  # load and store instructions of local memory
    matrix_instructions: int
    wide_loads: int  # of 128 bits per thread from global memory, or of a tile by the tensor memory accelerator


def resources(spec: CompileSpec) -> Resources:
    """Compile to machine code and measure it; raises Triton's error if it cannot be compiled."""
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
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        command = [tool, "--dump-resource-usage", "--dump-sass", cubin.name]
        code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", code)
    assert found, code

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


def linear_logprob_specs(dtype: torch.dtype, architecture: int) -> list[CompileSpec]:
    kind = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    tile = Tile.of(dtype, architecture)

    def argument(kind: str, rows: int, columns: int) -> str:
        return f"tensordesc<{kind}[{rows}, {columns}]>" if tile.descriptors else f"*{kind}"

    def spec(name: str, kernel: Any, signature: dict[str, str], stages: int) -> CompileSpec:
        operands = dict(h=argument(kind, tile.tokens, tile.depth), w=argument(kind, tile.columns, tile.depth))
        signature |= operands | dict(targets="*i64", tokens="i32", vocabulary="i32", scale="fp32")
        aligned = [name for name, type in signature.items() if type.startswith("*")]
        return CompileSpec(
            name=f"linear_logprob.{name} {kind}",
            kernel=kernel,
            signature=signature,
            constants=tile.constants(hidden_size=2048),
            architecture=architecture,
            aligned=(*aligned, *(["out_stride"] if "out_stride" in signature else [])),
            options=launch_options(tile.warps, stages),
        )

    gradients = dict(coefficients="*fp32", stride="i32", out_stride="i32")
    gradients["out"] = argument("bf16" if kind == "bf16" else "fp32", tile.tokens, tile.columns // 2)
    return [
        spec("statistics", statistics_kernel, dict(out="*fp32", splits="i32"), tile.stages),
        spec("logit_gradients", logit_gradients_kernel, gradients, tile.stages - 1),
    ]


POINTERS = dict(
    parameters="*fp64", dampened="fp32",
    logprobs="*fp32", rollout_logprobs="*fp32", old_logprobs="*fp32", advantages="*fp32",
    mask="*i1", cu_seqlens="*i32", prefix_min="*fp32", given_value="*fp32", given_index="*i32",
    loss="*fp32", coefficient="*fp32", kept="*i1", rows="*fp64", histograms="*i64",
)  # fmt: skip


GIVEN = {"second_moment": "given_index", "veto_suffix": "given_index", "clip_sequence_mean": "given_value"}


def token_pass_spec(name: str, chunks: bool, architecture: int) -> CompileSpec:
    rule = RULES[name]
    given = {"prefix_min" if chunks else None, None if rule.computed and not chunks else GIVEN.get(name)}
    absent = {"prefix_min", "given_value", "given_index"} - given
    signature = {argument: type for argument, type in POINTERS.items() if argument not in absent}
    return CompileSpec(
        name=f"token_pass.{name}" + (" chunks" if chunks else ""),
        kernel=token_pass_kernel,
        signature=signature,
        constants=kernel_constants(rule) | dict.fromkeys(absent),
        architecture=architecture,
        aligned=tuple(name for name, type in signature.items() if type.startswith("*")),
        options=LAUNCH_OPTIONS,
    )


def weighted_glu_specs(dtype: str, glu: Glu, architecture: int) -> list[CompileSpec]:
    kernels = {
        "forward": (weighted_glu_kernel, dict(gate_up=f"*{dtype}", probs="*fp32", out=f"*{dtype}")),
        "backward": (
            weighted_glu_gradients_kernel,
            dict(gradient=f"*{dtype}", gate_up=f"*{dtype}", probs="*fp32", out=f"*{dtype}", out_probs="*fp32"),
        ),
    }
    return [
        CompileSpec(
            name=f"weighted_glu.{name} {dtype}" + (" clamped" if glu.limit else ""),
            kernel=kernel,
            signature=signature | {"rows": "i32"},
            constants=constants(768, glu),
            architecture=architecture,
            aligned=tuple(signature),
            options=GLU_OPTIONS,
        )
        for name, (kernel, signature) in kernels.items()
    ]


def row_sums_spec(dtype: str, architecture: int) -> CompileSpec:
    pointers = dict(rows=f"*{dtype}", sources="*i64", out=f"*{dtype}")
    return CompileSpec(
        name=f"row_sums {dtype}",
        kernel=row_sums.row_sums_kernel,
        signature=pointers,
        constants=row_sums.constants(2048, 8),
        architecture=architecture,
        aligned=tuple(pointers),
        options=row_sums.LAUNCH_OPTIONS,
    )


def weight_gradient_spec(architecture: int) -> CompileSpec:
    pointers = dict(total="*fp32", gradient="*bf16", inputs="*bf16", ends="*i32")
    options = weight_gradient.launch(1536, 2048, architecture)
    compiler = {name: options.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    return CompileSpec(
        name="weight_gradient bf16",
        kernel=weight_gradient.group_products_kernel,
        signature=pointers,
        constants=options,
        architecture=architecture,
        aligned=tuple(pointers),
        options=compiler,
    )


SPECS = [
    *(
        spec
        for architecture in SHARED_MEMORY
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for spec in linear_logprob_specs(dtype, architecture)
    ),
    *(
        token_pass_spec(name, chunks, architecture)
        for architecture in SHARED_MEMORY
        for name in RULES
        for chunks in ((False, True) if name in {"clip_prefix", *GIVEN} else (False,))
    ),
    *(
        spec
        for architecture in SHARED_MEMORY
        for dtype in ("bf16", "fp32")
        for glu in (Glu(), Glu(1.702, 7.0, 1.0))
        for spec in weighted_glu_specs(dtype, glu, architecture)
    ),
    *(row_sums_spec(dtype, architecture) for architecture in SHARED_MEMORY for dtype in ("bf16", "fp32")),
    *map(weight_gradient_spec, SHARED_MEMORY),
]


def main() -> None:
    rows = []
    for spec in SPECS:
        used = resources(spec)
        rows.append(
            {
                "kernel": spec.name,
                "arch": f"sm_{spec.architecture}",
                "warps": spec.options.get("num_warps", 4),
                "stages": spec.options.get("num_stages", 3),
                "registers": used.registers,
                "shared_bytes": used.shared_bytes,
                "stack_bytes": used.stack_bytes,
                "spill_instructions": used.spills,
                "matrix_instructions": used.matrix_instructions,
                "wide_loads": used.wide_loads,
            }
        )
    write_table("triton_resources", rows)


if __name__ == "__main__":
    main()
