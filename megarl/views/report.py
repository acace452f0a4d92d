"""One self-contained HTML page about one run or several side by side: `write_report`.

Reads recipe.toml, metrics.jsonl and events.jsonl alone, and makes do with what is there: a run that has just begun, or
was killed in the middle of a line, still gives a page, with a note on what is missing.
"""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.storage.files import write_atomic

Record = dict[str, Any]


@dataclass
class Run:
    """What a run directory says about a run."""

    name: str
    recipe: str  # TOML
    settings: dict[str, Any]  # the recipe, flat: "schedule.stages" -> 4
    updates: list[Record]  # by update, each once
    events: list[Record]
    notes: list[str] = field(default_factory=list)

    @property
    def updates_per_stage(self) -> int:
        return self.settings["schedule.updates_per_stage"]

    @property
    def stages(self) -> int:
        return self.settings["schedule.stages"]

    @property
    def evaluations(self) -> list[Record]:
        """The newest evaluation of each policy, in the order of the policies."""
        found = {e["stage"]: e for e in self.events if e.get("event") == "evaluation" and _is_evaluation(e)}
        return [found[stage] for stage in sorted(found)]

    @property
    def phase_seconds(self) -> dict[tuple[int, str], float]:
        """(stage, phase) -> seconds of wall time, failed attempts included."""
        seconds: dict[tuple[int, str], float] = {}
        for event in self.events:
            if event.get("event") in ("phase_end", "phase_failed"):
                key = (int(event.get("stage", 0)), str(event.get("phase", "?")))
                seconds[key] = seconds.get(key, 0.0) + float(event.get("seconds", 0.0))
        return seconds

    def column(self, name: str) -> tuple[list[int], list[float]]:
        """(updates, values) of a metric, where it is a finite number."""
        x, y = [], []
        for record in self.updates:
            value = record.get(name)
            if isinstance(value, (int, float)) and math.isfinite(value):
                x.append(record["update"])
                y.append(float(value))
        return x, y


def write_report(run_dirs: list[Path], output: Path) -> Path:
    """Write the page about ``run_dirs`` to ``output`` and return that; `UserError` for what is no run directory."""
    from megarl.views.report_page import render

    runs = [read_run(Path(path), name) for path, name in zip(run_dirs, short_names(run_dirs), strict=True)]
    output = Path(output)
    if output.is_dir():
        raise UserError(f"cannot write the report: {output} is a directory")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(output, render(runs))
    return output


def short_names(run_dirs: list[Path]) -> list[str]:
    """The last part of each path, or as many parts as tell the paths apart."""
    paths = [Path(path).resolve() for path in run_dirs]
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return names


def read_run(root: Path, name: str) -> Run:
    path = root / "recipe.toml"
    if not path.is_file():
        raise UserError(f"{root} is not a run directory: it has no recipe.toml")
    try:
        recipe = path.read_text()
        settings = _flatten(tomllib.loads(recipe))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    for key in ("schedule.stages", "schedule.updates_per_stage"):
        if not isinstance(settings.get(key), int) or settings[key] < 1:
            raise UserError(f"{path} is no resolved recipe: {key} is {settings.get(key)!r}")
    run = Run(name, recipe, settings, [], [])
    records = _read_lines(root / "metrics.jsonl", run.notes)
    by_update = {record["update"]: record for record in records if isinstance(record.get("update"), int)}
    run.updates = [by_update[update] for update in sorted(by_update)]
    run.events = _read_lines(root / "events.jsonl", run.notes)
    total = run.stages * run.updates_per_stage
    if not run.evaluations and settings.get("eval.every"):
        run.notes.append("no evaluation has been made yet")
    if len(run.updates) < total:
        run.notes.append(f"not finished: {len(run.updates)} of {total} updates")
    return run


def _read_lines(path: Path, notes: list[str]) -> list[Record]:
    if not path.exists():
        notes.append(f"{path.name} is not there yet")
        return []
    records, damaged = [], 0
    for line in path.read_bytes().split(b"\n"):
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            records.append(record)
            damaged += not isinstance(record, dict)
    if damaged:
        notes.append(f"{path.name}: left out {damaged} line{'s' * (damaged > 1)} that could not be read")
    return [record for record in records if isinstance(record, dict)]


def _is_evaluation(event: Record) -> bool:
    return isinstance(event.get("stage"), int) and isinstance(event.get("accuracy"), (int, float))


def _flatten(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


# ----------------------------------------------------------------------------------------------------------- summary


def interval(event: Record) -> tuple[float, float]:
    """The 95 % interval of an evaluation; of no width where none was recorded."""
    match event.get("ci95"):
        case [int() | float() as low, int() | float() as high]:
            return float(low), float(high)
    return event["accuracy"], event["accuracy"]


def half_width(event: Record) -> float:
    low, high = interval(event)
    return (high - low) / 2


def summary(run: Run) -> dict[str, str]:
    """The cells of a run's row in the table at the top."""
    evaluations = run.evaluations
    base = evaluations[0] if evaluations and evaluations[0]["stage"] == 0 else None
    final = evaluations[-1] if len(evaluations) > 1 else None
    gain = "-"
    if base and final:
        # the two estimates as if independent; on the same prompts they are not, and the true interval is narrower
        half = math.hypot(half_width(base), half_width(final))
        gain = f"{final['accuracy'] - base['accuracy']:+.3f} ± {half:.3f}"
    ages = run.column("staleness")[1]
    tokens = sum(run.column("tokens")[1])
    seconds = sum(run.phase_seconds.values())
    return {
        "Run": run.name,
        "Objective": str(run.settings.get("objective.name", "-")),
        "Base accuracy": _estimate(base),
        "Final accuracy": _estimate(final),
        "Gain (95 %)": gain,
        "Updates": f"{len(run.updates):,} / {run.stages * run.updates_per_stage:,}",
        "Largest staleness": f"{max(ages):,.0f}" if ages else "-",
        "Time in phases": clock(seconds) if seconds else "-",
        "Tokens trained on": f"{tokens:,.0f}" if tokens else "-",
        **idle_shares(run),
    }


def idle_shares(run: Run) -> dict[str, str]:
    """Of a live run, how much of their time trainers and engines waited for each other; the mean age of a token."""
    if run.settings.get("schedule.kind") != "live":
        return {}
    waited, seconds = (sum(run.column(name)[1]) for name in ("idle_seconds", "seconds"))
    ages = run.column("staleness/mean")[1]
    engines = [e for e in run.events if e.get("event") == "idle" and e.get("role") == "rollout" and e.get("seconds")]
    idle, working = (sum(float(e.get(name, 0.0)) for e in engines) for name in ("idle_seconds", "seconds"))
    return {
        "Mean staleness": f"{sum(ages) / len(ages):,.1f}" if ages else "-",
        "Trainers idle": f"{waited / seconds:.1%}" if seconds else "-",
        "Engines idle": f"{idle / working:.1%}" if working else "-",
    }


def _estimate(event: Record | None) -> str:
    return f"{event['accuracy']:.3f} ± {half_width(event):.3f}" if event else "-"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
