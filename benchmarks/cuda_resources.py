"""Registers, shared memory, spills and stack of the CUDA kernels, by architecture. Needs nvcc but no GPU.

python benchmarks/cuda_resources.py
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import ROOT, write_table

ARCHITECTURES = (80, 90)  # those of CMakeLists.txt
SOURCES = sorted((ROOT / "csrc/cuda").glob("*.cu"))
_REPORT = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers(?:.*?(\d+) bytes smem)?",
    re.DOTALL,
)


def resources(source: Path, architecture: int, *flags: str) -> list[dict[str, Any]]:
    """Compile one file to machine code; returns a row for each kernel. `CalledProcessError` if it does not compile.

    The columns: shared_bytes is static shared memory per block, without the dynamic part that a launch adds;
    stack_bytes is local memory per thread, for spilled registers or arrays that are indexed at run time.

    flags: additional flags for nvcc.
    """
    with tempfile.TemporaryDirectory() as directory:
        subprocess.run([sys.executable, ROOT / "csrc/translate_rules.py", f"{directory}/megarl_rules.h"], check=True)
        includes = [f"-I{ROOT / 'csrc/include'}", f"-I{directory}"]
        command = ["nvcc", "-std=c++17", "-O3", f"-arch=sm_{architecture}", *includes, *flags]
        command += ["-Xptxas", "-v", "-cubin", "-o", f"{directory}/cubin", str(source)]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    rows = []
    for part in re.split(r"(?=ptxas info\s+: Compiling)", report)[1:]:
        found = _REPORT.search(part)
        assert found, part
        stack, stores, loads, registers, shared = (int(number or 0) for number in found.groups()[1:])
        rows.append(
            {
                "kernel": f"{source.stem}: {_readable(found[1])}",
                "arch": f"sm_{architecture}",
                "registers": registers,
                "shared_bytes": shared,
                "stack_bytes": stack,
                "spill_bytes": stores + loads,
            }
        )
    return sorted(rows, key=lambda row: row["kernel"])


def _readable(symbol: str) -> str:
    """The kernel's name with its template arguments, without namespaces and parameters."""
    if shutil.which("c++filt") is None:
        return symbol
    name = subprocess.run(["c++filt", symbol], check=True, capture_output=True, text=True).stdout.strip()
    name = re.sub(r"\(anonymous namespace\)::|megarl::|^void ", "", name)
    return name.split("(")[0]


def main() -> None:
    if shutil.which("nvcc") is None:
        sys.exit("nvcc is not on PATH: install the CUDA toolkit to measure; the stored table is unchanged")
    write_table("cuda_resources", [row for a in ARCHITECTURES for source in SOURCES for row in resources(source, a)])


if __name__ == "__main__":
    main()
