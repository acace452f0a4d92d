"""Reads recipe.toml, metrics.jsonl and events.jsonl of a run, for the report and other views.

A run that has just begun, or was killed in the middle of a line, is read as far as possible, with notes on what is
missing.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.recipe.load import flatten
from megarl.storage.checked_json import Record, read_intact_lines


@dataclass
class Run:
    """A run or a branch, as its files describe it; a branch has only the updates of its own stages."""

    root: Path
    name: str
    recipe: str  # TOML
    settings: dict[str, Any]  # the recipe, flat: "schedule.stages" -> 4
    updates: list[Record]  # lines of metrics.jsonl, ordered by update, each once
    events: list[Record]
    notes: list[str] = field(default_factory=list)
    own_stages: range = range(0)  # stages whose updates this run makes; not those of a branch's origin

    @property
    def begins(self) -> int:
        """Number of updates before its own: 0, unless it is a branch."""
        return self.own_stages.start * self.updates_per_stage

    @property
    def last(self) -> int:
        """The number of its last update when it is finished."""
        return self.own_stages.stop * self.updates_per_stage

    @property
    def updates_per_stage(self) -> int:
        return self.settings["schedule.updates_per_stage"]

    @property
    def stages(self) -> int:
        return self.settings["schedule.stages"]

    @property
    def evaluations(self) -> list[Record]:
        """The evaluations on the first suite, as in `suites`."""
        return next(iter(self.suites.values()), [])

    @property
    def suites(self) -> dict[str, list[Record]]:
        """The newest evaluation of each policy on each suite, in the order of the policies."""
        found: dict[str, dict[int, Record]] = {}
        for event in self.events:
            if event.get("event") == "evaluation":
                found.setdefault(event["suite"], {})[event["update"]] = event
        return {suite: [by_update[u] for u in sorted(by_update)] for suite, by_update in found.items()}

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
        """(updates, values) of a metric, for the updates in which it is a finite number."""
        x, y = [], []
        for record in self.updates:
            value = record.get(name)
            if isinstance(value, (int, float)) and math.isfinite(value):
                x.append(record["update"])
                y.append(float(value))
        return x, y


def muted_by(records: Iterable[Record]) -> dict[str, str]:
    """{metric: cause} of the shares of tokens that objectives and their options clip, veto or mask: every metric
    ``CAUSE_fraction`` that the records also have by the sign of the advantage, in the order in which they appear."""
    signed = (name.rpartition("/") for record in records for name in record)
    names = dict.fromkeys(name for name, _, sign in signed if sign in ("positive", "negative"))
    ending = "_fraction"
    return {name: name.removesuffix(ending) for name in names if name.endswith(ending) and name != "kept_fraction"}


def read_run(root: Path, name: str) -> Run:
    """The run in directory ``root``, to be shown as ``name``; `UserError` if it has no resolved recipe."""
    path = root / "recipe.toml"
    if not path.is_file():
        raise UserError(f"{root} is not a run directory: it has no recipe.toml")
    try:
        recipe = path.read_text()
        settings = flatten(tomllib.loads(recipe))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    for key in ("schedule.stages", "schedule.updates_per_stage"):
        if not isinstance(settings.get(key), int) or settings[key] < 1:
            raise UserError(f"{path} is not a resolved recipe: {key} is {settings.get(key)!r}")
    run = Run(root, name, recipe, settings, [], [])
    run.own_stages = _own_stages(root, run.stages)
    records = _read_lines(root / "metrics.jsonl", run.notes)
    by_update = {record["update"]: record for record in records if isinstance(record.get("update"), int)}
    run.updates = [by_update[update] for update in sorted(by_update)]
    run.events = _read_lines(root / "events.jsonl", run.notes)
    total = run.last - run.begins
    causes: dict[str, str] = {}  # of learning nothing, each at its first occurrence
    for e in run.events:
        if e.get("event") == "learns_nothing":
            text = f"learns nothing, updates {e.get('first')} to {e.get('update')}: {e.get('cause')}"
            causes.setdefault(str(e.get("kind")), text)
    run.notes += causes.values()
    run.notes += dict.fromkeys(str(event["warning"]) for event in run.events if event.get("warning"))
    if len(run.updates) < total:
        run.notes.append(f"not finished: {len(run.updates)} of {total} updates")
    return run


def _own_stages(root: Path, stages: int) -> range:
    """All stages; of a branch the stage whose rollouts are links to another run's, and the later ones it has."""
    rollouts = {int(path.parent.name): path.is_symlink() for path in sorted(root.glob("stages/[0-9]*/rollouts"))}
    branched = [number for number, elsewhere in rollouts.items() if elsewhere]
    return range(branched[0], max(rollouts) + 1) if branched else range(stages)


def _read_lines(path: Path, notes: list[str]) -> list[Record]:
    if not path.exists():
        notes.append(f"{path.name} is not there yet")
        return []
    records, damaged = read_intact_lines(path)
    if damaged:
        notes.append(f"{path.name}: left out {damaged} line{'s' * (damaged > 1)} that could not be read")
    return records


def half_width(event: Record) -> float:
    """Half the width of the 95 % interval of an evaluation."""
    low, high = event["ci95"]
    return (high - low) / 2
