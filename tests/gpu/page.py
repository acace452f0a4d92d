"""The summary of `make gpu`: one page of Markdown, and a table of the steps."""

from __future__ import annotations

import csv
import importlib.metadata
import platform
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.steps import ROOT

PACKAGES = ("torch", "triton", "megatron-core", "transformers", "transformer-engine", "vllm", "sglang", "liger-kernel",
            "cut-cross-entropy", "reasoning-gym")  # fmt: skip
ORIGIN = ("cpu", "gpu", "torch", "triton", "commit")  # columns of all tables of benchmarks/; shown once on the page
SAID = 40  # lines of a step's output on the page


@dataclass(frozen=True)
class Result:
    name: str
    shows: str
    outcome: str  # passed, failed, skipped, over its limit
    why: str
    seconds: float
    output: str = ""

    @property
    def failed(self) -> bool:
        return self.outcome not in ("passed", "skipped")


def write_page(out: Path, results: list[Result], waiting: list[str]) -> None:
    """Write ``out/summary.md`` and ``out/steps.csv``; after each step, so that an interruption leaves the results."""
    counts = Counter(r.outcome for r in results)
    lines = ["# megarl on this machine's GPUs", ""]
    lines += [f"- {name}: {value}" for name, value in origin().items()]
    lines += ["", ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "nothing done", ""]
    if waiting:
        lines += [f"Not begun: {', '.join(waiting)}.", ""]
    lines += ["| step | shows that | outcome | s |", "|---|---|---|---|"]
    for r in results:
        lines += [f"| {r.name} | {r.shows} | {r.outcome}{': ' * bool(r.why)}{r.why} | {r.seconds:.0f} |"]
    for table in sorted(out.glob("*.csv")):
        if table.name != "steps.csv":
            lines += ["", f"## {table.stem}", "", *_table(table)]
    for result in results:
        if result.output:
            said = result.output.rstrip().splitlines()[-SAID:]
            lines += ["", f"## What {result.name} said last", "", "```", *said, "```"]
    with open(out / "steps.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "outcome", "why", "seconds"])
        writer.writerows([r.name, r.outcome, r.why, f"{r.seconds:.1f}"] for r in results)
    (out / "summary.md").write_text("\n".join(lines) + "\n")


def origin() -> dict[str, str]:
    """Date, commit, hardware and versions."""
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    installed = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()}
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": output_of("git", "describe", "--always", "--dirty=+", "--abbrev=12") or "unknown",
        "gpu": ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
        or "unknown",
        "nvcc": output_of("nvcc", "--version").rpartition("\n")[2] or "none",
        "cuda of torch": torch.version.cuda or "none",
        "processor": f"{platform.machine()}, Python {platform.python_version()}",
    } | {package: installed.get(package, "none") for package in PACKAGES}


def output_of(*command: str) -> str:
    """The output of a program; "" if it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return "" if done.returncode else done.stdout.strip()


def _table(path: Path) -> list[str]:
    with open(path, newline="") as file:
        columns, *rows = list(csv.reader(file))
    kept = [i for i, name in enumerate(columns) if name not in ORIGIN]
    lines = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(line[i] for i in kept) + " |" for line in lines]
