"""What the finished runs of a sweep logged, into lab/results.tar.xz: python -m lab.collect SWEEP.toml --output RUNS.

`evaluations.csv` has a line an evaluation; `updates.csv` the means of the metrics over `WINDOW` updates; `runs.csv` how
long the phases of each run took; `machine.json` the machine, the versions, and the commit that was
checked out at collection.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lab.results import RESULTS, load, save
from megarl.commands.sweep.plan import plan_sweep
from megarl.commands.sweep.results import FinishedRun, read_finished
from megarl.recipe.sweep import load_sweep

WINDOW = 8  # updates
METRICS = (
    "reward/mean",
    "entropy",
    "ess",
    "m2/all",
    "grad_norm",
    "kept_fraction",
    "clip_fraction",
    "veto_fraction",
    "m2_mask_fraction",
    "mask_fraction",
    "positive_share/loss",
    "positive_share/tokens",
    "dampen/token/good_prefix",
    "dampen/token/bad_prefix",
    "dampen/prefix/good_prefix",
    "dampen/prefix/bad_prefix",
    "lr",
)


def collect(
    sweep: Path, output: Path, machine: str | None = None, archive: Path = RESULTS, beside: bool = False
) -> None:
    """Write the files of ``sweep`` in ``archive`` anew, from its finished runs in ``output``.

    machine: the machine.json of the runs; default: that of this machine.
    beside: whether lines of seeds that no run in ``output`` has are kept.
    """
    plan = plan_sweep(load_sweep(sweep), output)
    made = read_finished(plan)
    place = [*plan.table.axes, "seed"]
    phases = ["rollout", "optimize", "evaluate", "live"]
    files = {
        "evaluations.csv": _csv([*place, "update", "accuracy", "prompts"], _evaluations(made)),
        "updates.csv": _csv([*place, "update", *METRICS], _updates(made)),
        "runs.csv": _csv([*place, "updates", "stages", *phases], _runs(made, phases)),
        "machine.json": json.dumps(_machine(sweep), indent=1) + "\n" if machine is None else machine,
    }
    kept = load(archive) if archive.exists() else {}
    if beside:
        for name in [name for name in files if name.endswith(".csv")]:
            files[name] = joined(kept[f"{sweep.stem}/{name}"], files[name])
    save(kept | {f"{sweep.stem}/{name}": text for name, text in files.items()}, archive)
    print(f"{len(made)} of {len(plan.jobs)} runs -> {sweep.stem}/ in {archive}")


def _place(one: FinishedRun) -> dict[str, Any]:
    return one.job.point.values | {"seed": one.job.replicate.removeprefix("seed_")}


def _evaluations(made: list[FinishedRun]) -> Iterator[dict[str, Any]]:
    for one in made:
        for event in one.run.evaluations:
            yield _place(one) | {"update": event["update"], "accuracy": event["accuracy"], "prompts": event["prompts"]}


def _updates(made: list[FinishedRun]) -> Iterator[dict[str, Any]]:
    """Of each window the number of its last update, and the means."""
    for one in made:
        lines = one.run.updates
        for begin in range(0, len(lines), WINDOW):
            window = lines[begin : begin + WINDOW]
            means = {}
            for name in METRICS:
                values = [line[name] for line in window if isinstance(line.get(name), int | float)]
                if values:
                    means[name] = f"{sum(values) / len(values):.3g}"
            yield _place(one) | {"update": window[-1]["update"]} | means


def _runs(made: list[FinishedRun], phases: list[str]) -> Iterator[dict[str, Any]]:
    for one in made:
        seconds = dict.fromkeys(phases, 0.0)
        for event in one.run.events:
            if event["event"] == "phase_end":
                seconds[event["phase"]] += event["seconds"]
        schedule = one.job.recipe.schedule
        stages = 1 if one.job.source else schedule.stages
        sizes = {"updates": stages * schedule.updates_per_stage, "stages": stages}
        yield _place(one) | sizes | {phase: round(value, 2) for phase, value in seconds.items()}


def _csv(columns: list[str], lines: Iterator[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def joined(kept: str, new: str) -> str:
    """The lines of both CSVs; of a seed that both have, those of ``new``."""
    old, made = (list(csv.DictReader(io.StringIO(text))) for text in (kept, new))
    again = {line["seed"] for line in made}
    return _csv(list((made or old)[0]), iter([line for line in old if line["seed"] not in again] + made))


def _machine(sweep: Path) -> dict[str, Any]:
    processor = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "unknown",
    )
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    return {
        "command": f"megarl sweep {sweep}",
        "collected_at": commit,
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "megatron-core", "reasoning-gym")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="where megarl sweep put the runs")
    parser.add_argument("--machine", type=Path, help="machine.json of runs that another machine made")
    parser.add_argument("--beside", action="store_true", help="keep the lines of seeds that these runs do not have")
    options = parser.parse_args()
    collect(options.sweep, options.output, options.machine and options.machine.read_text(), beside=options.beside)


if __name__ == "__main__":
    main()
