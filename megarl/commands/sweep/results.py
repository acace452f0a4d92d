"""The results of a sweep: runs.csv with a line per evaluation, and the table with a row per point and suite."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl import estimates
from megarl.commands.sweep.plan import Job, SweepPlan
from megarl.errors import UserError
from megarl.estimates import Interval, mean_of_replicates
from megarl.recipe.sweep import Point
from megarl.storage.run_dir.evaluations import SuiteResponses
from megarl.views.comparison import Side, check_same_prompts
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

    The intervals cover other prompts and, with several replicates, other replicates too: see `_estimate`.
    """

    point: Point
    suite: str
    replicates: int
    accuracy: Estimate  # of the runs' results
    gain: Estimate | None  # of the results over the policies that the runs began with
    difference: Estimate | None  # from the baseline, over the replicates that both have

    def texts(self) -> list[str]:
        """Accuracy, gain and difference as text."""
        return [self.accuracy.text(), *(one.text("+") if one else "-" for one in (self.gain, self.difference))]


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
    last = [_Result.of(f, suite) for f in runs]
    both = [(f.run.begins, _Result.of(f, suite, first=True), _Result.of(f, suite)) for f in runs]
    with_start = [(before, after) for begins, before, after in both if begins == before.update < after.update]
    gain = _differences(with_start) if len(with_start) == len(runs) else None
    pairs = [(reference[f.job.replicate], f) for f in runs if f.job.replicate in reference]
    differences = [(_Result.of(a, suite), _Result.of(b, suite)) for a, b in pairs if suite in a.run.suites]
    accuracy = _estimate([result.accuracy for result in last], _over_prompts(last))
    low, high = accuracy.ci95  # Student's of two replicates is wider than what is possible
    accuracy = Estimate(accuracy.mean, [max(low, 0.0), min(high, 1.0)])
    return Row(point, suite, len(runs), accuracy, gain, _differences(differences))


@dataclass(frozen=True)
class _Result:
    """An evaluated policy of a run."""

    root: Path
    suite: str
    event: dict[str, Any]

    @classmethod
    def of(cls, finished: FinishedRun, suite: str, first: bool = False) -> _Result:
        """The last policy of the run, or the first."""
        return cls(finished.job.directory, suite, finished.run.suites[suite][0 if first else -1])

    @property
    def update(self) -> int:
        return int(self.event["update"])

    @property
    def accuracy(self) -> float:
        return float(self.event["accuracy"])


def _scores(results: list[_Result]) -> list[np.ndarray]:
    """Of each policy [prompts, samples] of 1 for right and 0; `UserError` unless their prompts are the same."""
    suites = [SuiteResponses.of(result.root, result.suite) for result in results]
    for other in suites[1:]:
        check_same_prompts(suites[0], other)
    return [Side(str(r.root), r.root, r.update).correct(r.suite)[1] for r in results]


def _estimate(values: list[float], over_prompts: Interval) -> Estimate:
    """The mean over replicates. Its interval covers other replicates, by Student's t, and other prompts, by
    ``over_prompts``; if that is NaN, since the replicates have different prompts, Student's t covers both."""
    if len(values) == 1:
        return Estimate(values[0], over_prompts)
    mean, (low, high) = mean_of_replicates(np.array(values))
    below, above = mean - over_prompts[0], over_prompts[1] - mean
    if math.isnan(below):
        return Estimate(mean, [low, high])
    return Estimate(mean, [mean - math.hypot(mean - low, below), mean + math.hypot(high - mean, above)])


def _differences(pairs: list[tuple[_Result, _Result]]) -> Estimate | None:
    """The mean difference over (one policy, another one) of each replicate."""
    if not pairs:
        return None
    values = [second.accuracy - first.accuracy for first, second in pairs]
    return _estimate(values, _difference_over_prompts(pairs))


def _over_prompts(results: list[_Result]) -> Interval:
    """The interval over prompts of the mean accuracy of the replicates; NaN if their prompts differ."""
    if len(results) == 1:
        return list(interval(results[0].event))
    try:
        scores = _scores(results)
    except UserError:
        return [math.nan, math.nan]
    return estimates.interval(np.mean([x.mean(1) for x in scores], axis=0), sum(x.shape[1] for x in scores))


def _difference_over_prompts(pairs: list[tuple[_Result, _Result]]) -> Interval:
    """The paired interval over prompts of the mean difference of the replicates; NaN if any prompts differ."""
    try:
        scores = _scores([result for pair in pairs for result in pair])
    except UserError:
        return [math.nan, math.nan]
    one, other = (np.mean([x.mean(1) for x in scores[side::2]], axis=0) for side in (0, 1))
    return estimates.paired(one, other).ci95


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
    over = "seeds or runs and over prompts (if n is 1: over prompts)" if several else "prompts"
    lines = [f"95 % intervals over {over}; differences are paired, from {plan.table.reference}"]
    width = max(len(row.point.name) for row in found)
    for suite in dict.fromkeys(row.suite for row in found):
        head = f"{'':{width}}   n  {'accuracy':23}  {'gain':26}  difference"
        lines += [suite, head]
        for row in found:
            if row.suite == suite:
                accuracy, gain, difference = row.texts()
                text = f"{accuracy:23}  {gain:26}  {difference}"
                lines.append(f"{row.point.name:{width}}  {row.replicates:2}  {text}")
    return "\n".join(lines)
