"""Runs the files of `on_device/` in other processes, because the device must be there when torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rehearsal.build import build

HERE = Path(__file__).parent
# the longest first, for workers side by side
LONG = ("test_updates", "test_runs", "test_memory", "test_kernels")
FILES = sorted((HERE / "on_device").glob("test_*.py"), key=lambda f: (*(f.stem != name for name in LONG), f.stem))


def run_on_device(*arguments: str, **environment: str) -> None:
    build()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    # in front of the packages of a suite
    path = os.pathsep.join([str(HERE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    device = {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "MEGARL_REHEARSAL": "1"}
    result = subprocess.run(command, env=os.environ | device | environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_file_passes_on_the_rehearsal_device(file: Path) -> None:
    run_on_device(str(file))


def test_cuda_kernels_pass_the_tests_of_a_gpu() -> None:
    """The kernels of `csrc/cuda`, compiled for the host with fibres as threads, in `tests/kernels/test_gpu.py`."""
    run_on_device("tests/kernels/test_gpu.py", "-k", "cuda", MEGARL_REQUIRE_GPU="1")
