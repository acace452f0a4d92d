"""The tests beside `make test`, which need more time or more packages: ``make test-slow WHAT="layouts crashes"``.

Without WHAT: all suites of `CONTINUOUS`. A suite first installs what it needs, out of sight of `.venv`. Every suite is
run, also after one has failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

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
    "engines": Suite(("-m", "vllm or sglang"), before=("tools/setup_venv.py", "sglang")),
    "cluster": Suite(("tests/launch",), before=("tools/setup_venv.py", "launch")),
    # compilers of GPU kernels need no GPU
    "machine-code": Suite(MACHINE_CODE, jobs=2),
    "triton": Suite(
        (MACHINE_CODE[1], "-k", "not sm_80"),
        jobs=2,
        packages=("--no-deps", f"triton=={GPU_TRITON}"),
        environment={"MEGARL_TRITON": GPU_TRITON},
    ),
    "trackers": Suite(
        ("tests/storage/metrics/test_trackers.py",),
        packages=("-c", "build/trackers.txt", *TRACKERS),
        environment={"MEGARL_REQUIRE_TRACKERS": "1"},
    ),
    # the actor on a newer Megatron-Core than the tested one
    "megatron-next": Suite(
        ("tests/actor",),
        packages=(
            *("--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--ignore-requires-python"),
            *("--platform", "manylinux_2_28_x86_64", f"megatron-core=={MEGATRON_NEXT}"),
        ),
    ),
}
CONTINUOUS = [name for name in SUITES if name != "megatron-next"]  # which Megatron's next version may break


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


def run(name: str) -> bool:
    """Whether all tests of the suite passed."""
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
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in SUITES]:
        sys.exit(f"no suite {unknown[0]!r}; there are {', '.join(SUITES)}")
    if failed := [name for name in names or CONTINUOUS if not run(name)]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
