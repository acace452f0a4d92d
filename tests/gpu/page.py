"""The summary of `make gpu`: one page of Markdown."""

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
    """Write ``out/summary.md``; after each step, so that an interruption leaves the results."""
    counts = Counter(r.outcome for r in results)
    lines = ["# megarl on this machine's GPUs", "", *(f"- {name}: {value}" for name, value in origin().items())]
    lines += ["", ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "nothing done", ""]
    lines += [f"Not begun: {', '.join(waiting)}.", ""] * bool(waiting)
    lines += ["| step | shows that | outcome | s |", "|---|---|---|---|"]
    for r in results:
        lines += [f"| {r.name} | {r.shows} | {r.outcome}{': ' * bool(r.why)}{r.why} | {r.seconds:.0f} |"]
    for table in sorted(out.glob("*.csv")):
        with open(table, newline="") as file:
            columns, *rows = csv.reader(file)
        kept = [i for i, name in enumerate(columns) if name not in ORIGIN]
        cells = ([row[i] for i in kept] for row in (columns, ["---"] * len(columns), *rows))
        lines += ["", f"## {table.stem}", "", *(f"| {' | '.join(row)} |" for row in cells)]
    for result in results:
        if result.output:
            said = result.output.rstrip().splitlines()[-SAID:]
            lines += ["", f"## What {result.name} said last", "", "```", *said, "```"]
    (out / "summary.md").write_text("\n".join(lines) + "\n")


def origin() -> dict[str, str]:
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    installed = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in importlib.metadata.distributions()}
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": output_of("git", "describe", "--always", "--dirty=+", "--abbrev=12") or "unknown",
        "gpu": ", ".join(f"{count} x {name}" for name, count in Counter(devices).items()),
        "driver": driver.partition("\n")[0] or "unknown",
        "cuda of torch": torch.version.cuda or "none",
        "processor": f"{platform.machine()}, Python {platform.python_version()}",
    } | {package: installed.get(package, "none") for package in PACKAGES}


def output_of(*command: str) -> str:
    """The output of a program; "" if it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return "" if done.returncode else done.stdout.strip()
