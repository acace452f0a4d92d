"""Every CUDA kernel, compiled for sm_80 and sm_90 without a GPU, must neither spill registers nor use a stack."""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ROOT
from tests.kernels.benchmark import load_benchmark
from tests.kernels.test_constants import shipped

SOURCES = sorted((ROOT / "csrc/cuda").glob("*.cu"))
pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")


cuda_resources = load_benchmark("cuda_resources")
translate_rules = runpy.run_path(str(ROOT / "csrc/translate_rules.py"))["header"]


def compiled(source: Path, architecture: int) -> list[dict[str, Any]]:
    """The compiler's report of a file's kernels, from a cache if sources, flags and compiler are as before."""
    flags = ("-Werror", "all-warnings")
    headers = [path for path in sorted((ROOT / "csrc").rglob("*.*")) if path.suffix in (".h", ".cuh")]
    compiler = subprocess.run(["nvcc", "--version"], check=True, capture_output=True).stdout
    texts = [path.read_bytes() for path in (source, ROOT / "benchmarks/cuda_resources.py", *headers)]
    seen = hashlib.sha256(b"".join([f"{architecture} {flags}".encode(), translate_rules().encode(), compiler, *texts]))
    cache = Path(os.environ.get("MEGARL_CACHE", "~/.cache/megarl")).expanduser() / "cuda_resources"
    path = cache / f"{seen.hexdigest()}.json"
    if not path.exists():
        rows = cuda_resources.resources(source, architecture, *flags)
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(rows))
        unfinished.replace(path)
    return json.loads(path.read_text())


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_no_spills_and_no_stack(source: Path, architecture: int) -> None:
    kernels = compiled(source, architecture)
    assert len(kernels) == {"token_pass": len(shipped()) + 1, "second_moment": 3}.get(source.stem, 1)
    for kernel in kernels:
        assert kernel["stack_bytes"] == kernel["spill_bytes"] == 0, kernel
