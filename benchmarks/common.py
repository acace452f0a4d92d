"""Shared code of the benchmarks: tables with hardware, versions and commit; processes; timing on a GPU."""

from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
NOT_MEASURED = "not measured"  # content of a cell if the hardware or the compared package is missing; never an estimate


def write_table(name: str, rows: list[dict[str, Any]], directory: Path = RESULTS) -> Path:
    """Print ``rows`` as one table and write them to ``directory/name.csv``; returns the path of the CSV.

    The columns are the keys in order of first appearance; a row without a key has an empty cell. Floats get four
    significant digits. Each line of the CSV also has the columns of `origin`.
    """
    columns, cells = _cells(rows)
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in (columns, *cells):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    path = write_csv(name, rows, directory)
    print(f"written to {path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}", flush=True)
    return path


def write_csv(name: str, rows: list[dict[str, Any]], directory: Path) -> Path:
    """As `write_table`, and prints nothing."""
    columns, cells = _cells(rows)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.csv"
    facts = origin()
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*columns, *facts])
        writer.writerows([*line, *facts.values()] for line in cells)
    return path


def _cells(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return columns, [[_cell(row.get(column, "")) for column in columns] for row in rows]


def origin() -> dict[str, str]:
    """Hardware, versions and commit of this process; ``+`` after the commit means local changes."""
    versions = {name: _version(name) for name in ("torch", "triton")}
    return {"cpu": _processor(), "gpu": _gpu()} | versions | {"commit": _commit()}


def in_own_process(script: str, arguments: list[str], threads: int = 1) -> dict[str, Any]:
    """Run ``script arguments`` in a new process; returns the JSON object in the last line of its output.

    Only a new process shows its own peak memory, and starts OpenMP with the wanted number of threads. The child's
    stderr is that of this process.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-W", "ignore", script, *arguments]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(result.stdout.splitlines()[-1])


def time_command(command: list[str]) -> tuple[float, float]:
    """Run a command in `ROOT`; (wall, CPU) seconds, with those of processes that outlive it, as fork servers do.

    Its output is dropped. This process must have no other children.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def parse_with_threads(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the options and --threads; restarts this process if OpenMP began with another number of threads."""
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != str(arguments.threads):
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    torch.set_num_threads(arguments.threads)
    return arguments


def gpu_milliseconds(run: Callable[[], Any], repeats: int = 10) -> float:
    """Median milliseconds over ``repeats`` runs, each between two CUDA events, after three runs to warm up.

    Before each run, more bytes are written than the GPU's L2 cache holds, so that the cache has none of the input. This
    also keeps the GPU busy while the host launches the run, so a time includes waits for the host only during the run.
    """
    flush = torch.empty(2 * torch.cuda.get_device_properties().L2_cache_size, dtype=torch.int8, device="cuda")
    for _ in range(3):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        flush.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[repeats // 2]


def attempt(ways: dict[str, Callable[[], Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """({name: result}, {name: error}) of calling each way; one that fails does not stop the others."""
    results, failures = {}, {}
    for name, way in ways.items():
        try:
            results[name] = way()
        except Exception as error:
            failures[name] = f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return results, failures


def device_events(profile: torch.profiler.profile, device: str = "CUDA") -> list[Any]:
    """What torch's profiler recorded of the device: kernels and copies. Nothing where it has no CUPTI.

    Its named ranges, such as an optimizer's step, last from their first kernel to their last, and are left out.
    """
    wanted = getattr(torch.autograd.DeviceType, device)  # equal, never the same object
    events = (event for event in profile.events() or () if event.device_type == wanted)
    return [event for event in events if not event.is_user_annotation]


def launches_and_syncs(run: Callable[[], Any]) -> tuple[int | str, int]:
    """(kernels and copies on the device, waits of the host for the device) in one run."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    launches = len(device_events(profile)) or NOT_MEASURED
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    torch.cuda.set_sync_debug_mode("default")
    return launches, sum("synchroniz" in str(warning.message) for warning in caught)


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "none"


def _commit() -> str:
    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)

    head = git("rev-parse", "--short=12", "HEAD")
    if head.returncode:  # an unpacked archive
        return "unknown"
    # the results that a benchmark writes do not count as local changes
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results").stdout.strip()
    return head.stdout.strip() + ("+" if changed else "")
