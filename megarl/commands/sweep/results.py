"""The results of a sweep: runs.csv with a line per evaluation, and the table with a row per point and suite."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.commands.sweep.plan import Job, SweepPlan
from megarl.errors import UserError
from megarl.estimates import Interval, mean_of_replicates
from megarl.recipe.sweep import Point
from megarl.views.comparison import difference
from megarl.views.run_reader import Run, interval, muted_by, read_run

# metrics of the update before an evaluation that runs.csv contains
LAST = ("reward/mean", "entropy", "ess", "grad_norm")


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval."""

    mean: float
    ci95: Interval

    def text(self, sign: str = "") -> str:
        return f"{self.mean:{sign}.3f} [{self.ci95[0]:{sign}.3f}, {self.ci95[1]:{sign}.3f}]"


@dataclass(frozen=True)
class Row:
    """The results of a point on one suite: estimates over its replicates.

    With several replicates the intervals are Student's t over replicates, with only one they are over prompts.
    """

    point: Point
    suite: str
    replicates: int
    accuracy: Estimate  # of the runs' results
    gain: Estimate | None  # of the results over the policies that the runs began with
    difference: Estimate | None  # from the baseline, over the replicates that both have


@dataclass(frozen=True)
class FinishedRun:
    """A finished run of a sweep, and what was read from its directory."""

    job: Job
    run: Run


def read_finished(plan: SweepPlan) -> list[FinishedRun]:
    """Read the runs that are finished, without those that only generate rollouts for others."""
    return [FinishedRun(job, read_run(job.directory, job.name)) for job in plan.jobs if job.is_done()]


def rows(plan: SweepPlan, finished: Sequence[FinishedRun]) -> list[Row]:
    """A row for every suite and every point that has a finished run."""
    found = []
    for suite in dict.fromkeys(suite for each in finished for suite in each.run.suites):
        reference = {f.job.replicate: f for f in finished if _point(f).name == plan.table.reference}
        for point in plan.table.points():
            runs = [f for f in finished if _point(f).name == point.name and suite in f.run.suites]
            if runs:
                found.append(_row(point, suite, runs, reference if point.name != plan.table.reference else {}))
    return found


def _point(finished: FinishedRun) -> Point:
    assert finished.job.point is not None
    return finished.job.point


def _row(point: Point, suite: str, runs: list[FinishedRun], reference: dict[str, FinishedRun]) -> Row:
    last = [f.run.suites[suite][-1] for f in runs]
    accuracy = _estimate([event["accuracy"] for event in last], lambda: interval(last[0]))
    with_start = [f for f in runs if f.run.suites[suite][0]["update"] < f.run.suites[suite][-1]["update"]]
    gain = (
        _differences([(f, f.run.suites[suite][0]["update"], f) for f in with_start], suite)
        if len(with_start) == len(runs)
        else None
    )
    pairs = [(reference[f.job.replicate], None, f) for f in runs if f.job.replicate in reference]
    difference = _differences([pair for pair in pairs if suite in pair[0].run.suites], suite)
    return Row(point, suite, len(runs), accuracy, gain, difference)


def _estimate(values: list[float], over_prompts: Any) -> Estimate:
    """The mean over replicates; if there is only one value, its interval is that which ``over_prompts`` returns."""
    if len(values) == 1:
        return Estimate(values[0], list(over_prompts()))
    return Estimate(*mean_of_replicates(np.array(values)))


def _differences(pairs: list[tuple[FinishedRun, int | None, FinishedRun]], suite: str) -> Estimate | None:
    """The mean difference over (first run, update, second run) of each replicate.

    The difference is the last accuracy of the second run minus that of the first run after ``update`` (None: its last).
    """
    if not pairs:
        return None
    values = []
    for first, update, second in pairs:
        events = first.run.suites[suite]
        before = events[-1] if update is None else next(e for e in events if e["update"] == update)
        values.append(second.run.suites[suite][-1]["accuracy"] - before["accuracy"])
    first, update, second = pairs[0]
    return _estimate(values, lambda: _over_prompts(first, update, second, suite))


def _over_prompts(first: FinishedRun, update: int | None, second: FinishedRun, suite: str) -> Interval:
    """The paired interval of the difference of two policies over prompts; NaN if the prompts differ."""
    begin = first.run.suites[suite][-1]["update"] if update is None else update
    end = second.run.suites[suite][-1]["update"]
    try:
        return difference(first.job.directory, begin, second.job.directory, end, suite).ci95
    except UserError:
        return [math.nan, math.nan]


# ------------------------------------------------------------------------------------------------------------- files


def runs_csv(plan: SweepPlan, finished: Sequence[FinishedRun]) -> str:
    """One line per evaluation of a finished run, with the metrics of the update before it."""
    axes = list(plan.table.axes)
    muted = muted_by(record for each in finished for record in each.run.updates)
    names = [*LAST[:-1], *muted, LAST[-1]]
    lines: list[dict[str, Any]] = []
    for each in finished:
        by_update = {record["update"]: record for record in each.run.updates}
        for suite, events in each.run.suites.items():
            for event in events:
                low, high = interval(event)
                values = {axis: _point(each).values[axis] for axis in axes}
                place = {"replicate": each.job.replicate, "suite": suite, "update": event["update"]}
                found = {"accuracy": event["accuracy"], "low": low, "high": high, "prompts": event.get("prompts")}
                metrics = by_update.get(event["update"], {})
                last = {name: metrics.get(name) for name in names}
                lines.append(values | place | found | last | {"run": str(each.job.directory)})
    return _csv([*axes, "replicate", "suite", "update", "accuracy", "low", "high", "prompts", *names, "run"], lines)


def as_records(found: Sequence[Row]) -> list[dict[str, Any]]:
    """The table as one object per row; unknown intervals are None."""
    records = []
    for row in found:
        record: dict[str, Any] = {**row.point.values, "suite": row.suite, "replicates": row.replicates}
        for name in ("accuracy", "gain", "difference"):
            estimate: Estimate | None = getattr(row, name)
            values = [estimate.mean, *estimate.ci95] if estimate else [math.nan] * 3
            for part, value in zip(("", "_low", "_high"), values, strict=True):
                record[name + part] = None if math.isnan(value) else round(value, 6)
        records.append(record)
    return records


def table_csv(plan: SweepPlan, found: Sequence[Row]) -> str:
    """`as_records` as CSV."""
    estimates = [name + part for name in ("accuracy", "gain", "difference") for part in ("", "_low", "_high")]
    return _csv([*plan.table.axes, "suite", "replicates", *estimates], as_records(found))


def _csv(columns: list[str], lines: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def table_text(plan: SweepPlan, found: Sequence[Row]) -> str:
    """The table for a terminal."""
    if not found:
        return "no run with an evaluation is finished"
    several = max(row.replicates for row in found) > 1
    over = "seeds or runs (if n is 1: over prompts)" if several else "prompts"
    lines = [f"95 % intervals over {over}; differences are paired, from {plan.table.reference}"]
    width = max(len(row.point.name) for row in found)
    for suite in dict.fromkeys(row.suite for row in found):
        head = f"{'':{width}}   n  {'accuracy':23}  {'gain':26}  difference"
        lines += [suite, head]
        for row in found:
            if row.suite == suite:
                gain = row.gain.text("+") if row.gain else "-"
                difference = row.difference.text("+") if row.difference else "-"
                text = f"{row.accuracy.text():23}  {gain:26}  {difference}"
                lines.append(f"{row.point.name:{width}}  {row.replicates:2}  {text}")
    return "\n".join(lines)
