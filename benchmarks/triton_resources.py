"""Registers, shared memory, spills and wide loads of the Triton kernels, by architecture. Needs no GPU.

python benchmarks/triton_resources.py
"""

from __future__ import annotations

from common import write_table

from megarl.kernels.aot import compile_specs, resources


def main() -> None:
    rows = []
    for spec in compile_specs():
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
