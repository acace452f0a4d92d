"""Compiles the kernels of `csrc/` if no installed megarl has those for CUDA, with CMake and nvcc alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "build/gpu-kernels"  # on PYTHONPATH of every step; it has libraries, no module


def main() -> None:
    from megarl.kernels.library import find_library

    found = find_library("cuda")
    if found is not None and not found.is_relative_to(KERNELS):
        print(f"installed: {found}")
        return
    import torch

    major, minor = torch.cuda.get_device_capability()
    tree = ROOT / "build/gpu-cmake"
    options = ["-DMEGARL_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={major}{minor}"]
    for command in (
        ["cmake", "-S", ROOT, "-B", tree, *options],
        ["cmake", "--build", tree, "--parallel"],
        ["cmake", "--install", tree, "--prefix", KERNELS],
    ):
        subprocess.run(command, check=True)
    print(f"compiled: {KERNELS}")


if __name__ == "__main__":
    main()
