"""``make gpu``: checks and benchmarks on this machine's GPUs, each step in a process of its own.

    python -m tests.gpu [STEP ...] [--small]

Writes ``summary.md``, ``log.txt`` and the benchmarks' tables to $OUT, or build/gpu. STEP: the name of a
step of `tests.gpu.steps`, or of a group of them: "first", "numbers" or "engines". It needs no package index: a step
that lacks a package is skipped. The exit code is 1 if a step failed or there is no GPU, 2 for an unknown step, else 0.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.gpu.build import KERNELS
from tests.gpu.page import Result, write_page
from tests.gpu.steps import BUDGETS, ROOT, Step, steps


def run_steps(chosen: list[Step], out: Path, report: Callable[[Result], None]) -> list[Result]:
    """Run steps one after another, but those `beside` each other together. What is known is written after each."""
    results: list[Result] = []
    left: dict[str, float] = dict(BUDGETS)
    writing = threading.Lock()

    def write() -> None:
        done = {result.name for result in results}
        write_page(out, results, [step.name for step in chosen if step.name not in done])

    def run(step: Step) -> None:
        result = run_step(step, left[step.group], out / "log.txt")
        with writing:
            results.append(result)
            report(result)
            write()

    write()
    with ThreadPoolExecutor(max(1, len(chosen))) as threads:
        for _, some in itertools.groupby(chosen, lambda step: (step.group, step.beside or step.name)):
            together, start = list(some), time.monotonic()
            list(threads.map(run, together))
            left[together[0].group] -= time.monotonic() - start
    return results


def run_step(step: Step, left: float, log: Path) -> Result:
    """Run a step in a process group of its own, killed at its end or limit. left: seconds that its group still has."""
    used_up = f"the {BUDGETS[step.group]} s of all of {step.group} are used up" if left < 1 else None
    if reason := step.lacks() or used_up:
        return Result(step.name, step.shows, "skipped", reason, 0.0)
    limit, start = min(step.limit, left), time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            step.command, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit)
            outcome, why = ("failed", f"exit code {code}") if code else ("passed", "")
        except subprocess.TimeoutExpired:
            outcome, why = "over its limit", f"{limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    with open(log, "a") as file:  # one write: other steps append to it, too
        file.write(f"==== {step.name}: {outcome} {why}\n{text}\n")
    return Result(step.name, step.shows, outcome, why, time.monotonic() - start, text)


def environment() -> dict[str, str]:
    """The environment of a step: Python finds this clone before an installed megarl, and kernels that "build" made."""
    given = os.environ.get("PYTHONPATH", "")
    path = [str(ROOT), *given.split(os.pathsep), str(KERNELS)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(p for p in path if p), "PYTHONUNBUFFERED": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP")
    parser.add_argument("--small", action="store_true", help="sizes for a rehearsal, which measure nothing")
    options = parser.parse_args()
    try:
        import torch
    except ImportError as error:
        sys.exit(f"no GPU to test: torch cannot be imported ({error})")
    if not (gpus := torch.cuda.device_count()):
        sys.exit(f"no GPU to test: torch {torch.__version__} sees none")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the step in progress ends too
    out = Path(os.environ.get("OUT") or ROOT / "build/gpu").resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "log.txt").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="megarl-gpu-") as work:
        known = steps(out, Path(work), gpus, options.small)
        names = {name for step in known for name in (step.name, step.group)}
        if unknown := set(options.steps) - names:
            parser.error(f"unknown steps {', '.join(sorted(unknown))}; known are {', '.join(sorted(names))}")
        chosen = [s for s in known if not options.steps or {s.name, s.group} & set(options.steps)]
        results = run_steps(
            chosen, out, lambda r: print(f"{r.name:<16}{r.outcome} {r.why} ({r.seconds:.0f} s)", flush=True)
        )
    print(f"summary: {out / 'summary.md'}")
    sys.exit(any(result.failed for result in results))


if __name__ == "__main__":
    main()
