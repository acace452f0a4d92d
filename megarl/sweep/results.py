"""What came of the runs of a sweep: a line an evaluation, a row a point, and a figure."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.errors import UserError
from megarl.estimates import Interval, mean_of_replicates, paired
from megarl.recipe.sweep import Point
from megarl.storage.evaluations import Answered
from megarl.sweep.plan import Job, Plan
from megarl.views.comparison import check_same_prompts
from megarl.views.run_reader import Run, interval, read_run

# of the last update of a run, in the file of runs
LAST = ("reward/mean", "entropy", "ess", "clip_fraction", "veto_fraction", "m2_mask_fraction", "grad_norm")


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval."""

    mean: float
    ci95: Interval

    def text(self, sign: str = "") -> str:
        return f"{self.mean:{sign}.3f} [{self.ci95[0]:{sign}.3f}, {self.ci95[1]:{sign}.3f}]"


@dataclass(frozen=True)
class Row:
    """A point on one suite: estimates over the replicates, of which there may be one alone.

    Over one the intervals are over prompts, over several they are Student's over replicates.
    """

    point: Point
    suite: str
    replicates: int
    accuracy: Estimate  # of the result
    gain: Estimate | None  # over the policy that each run began with
    difference: Estimate | None  # from the baseline, of the replicates that both have


@dataclass(frozen=True)
class Made:
    """A finished run."""

    job: Job
    run: Run


def read_made(plan: Plan) -> list[Made]:
    """The runs that are finished, without those that only share their rollouts."""
    return [Made(job, read_run(job.directory, job.name)) for job in plan.jobs if job.is_done()]


def rows(plan: Plan, made: Sequence[Made]) -> list[Row]:
    """Every point that has a finished run, on every suite."""
    found = []
    for suite in dict.fromkeys(suite for one in made for suite in one.run.suites):
        reference = {m.job.replicate: m for m in made if _point(m).name == plan.table.reference}
        for point in plan.table.points():
            runs = [m for m in made if _point(m).name == point.name and suite in m.run.suites]
            if runs:
                found.append(_row(point, suite, runs, reference if point.name != plan.table.reference else {}))
    return found


def _point(made: Made) -> Point:
    assert made.job.point is not None
    return made.job.point


def _row(point: Point, suite: str, runs: list[Made], reference: dict[str, Made]) -> Row:
    last = [m.run.suites[suite][-1] for m in runs]
    accuracy = _estimate([event["accuracy"] for event in last], lambda: interval(last[0]))
    begun = [m for m in runs if m.run.suites[suite][0]["update"] < m.run.suites[suite][-1]["update"]]
    gain = (
        _differences([(m, m.run.suites[suite][0]["update"], m) for m in begun], suite)
        if len(begun) == len(runs)
        else None
    )
    pairs = [(reference[m.job.replicate], None, m) for m in runs if m.job.replicate in reference]
    difference = _differences([pair for pair in pairs if suite in pair[0].run.suites], suite)
    return Row(point, suite, len(runs), accuracy, gain, difference)


def _estimate(values: list[float], alone: Any) -> Estimate:
    """Over replicates; of one alone with the interval that ``alone`` gives."""
    if len(values) == 1:
        return Estimate(values[0], list(alone()))
    return Estimate(*mean_of_replicates(np.array(values)))


def _differences(pairs: list[tuple[Made, int | None, Made]], suite: str) -> Estimate | None:
    """Of pairs of runs, of one replicate each: the second's result less the first's evaluation after so many updates.

    None: its last.
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


def _over_prompts(first: Made, update: int | None, second: Made, suite: str) -> Interval:
    """The paired interval of two policies over the prompts that both have answered; of no numbers where they differ."""
    sides = [Answered.of(made.job.directory, suite) for made in (first, second)]
    versions = [
        first.run.suites[suite][-1]["update"] if update is None else update,
        second.run.suites[suite][-1]["update"],
    ]
    try:
        check_same_prompts(*sides)
        scores = [
            np.array([np.mean([r.correctness for r in group.responses]) for group in side.read(version)])
            for side, version in zip(sides, versions, strict=True)
        ]
    except UserError:
        return [math.nan, math.nan]
    return paired(scores[0], scores[1]).ci95


# ------------------------------------------------------------------------------------------------------------- files


def runs_csv(plan: Plan, made: Sequence[Made]) -> str:
    """One line an evaluation of a finished run, with the metrics of the update before it."""
    axes = list(plan.table.axes)
    lines: list[dict[str, Any]] = []
    for one in made:
        by_update = {record["update"]: record for record in one.run.updates}
        for suite, events in one.run.suites.items():
            for event in events:
                low, high = interval(event)
                values = {axis: _point(one).values[axis] for axis in axes}
                place = {"replicate": one.job.replicate, "suite": suite, "update": event["update"]}
                found = {"accuracy": event["accuracy"], "low": low, "high": high, "prompts": event.get("prompts")}
                metrics = by_update.get(event["update"], {})
                last = {name: metrics.get(name) for name in LAST}
                lines.append(values | place | found | last | {"run": str(one.job.directory)})
    return _csv([*axes, "replicate", "suite", "update", "accuracy", "low", "high", "prompts", *LAST, "run"], lines)


def as_records(found: Sequence[Row]) -> list[dict[str, Any]]:
    """What the table says, one object a row; intervals that are not known are None."""
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


def table_csv(plan: Plan, found: Sequence[Row]) -> str:
    """`as_records` as CSV."""
    estimates = [name + part for name in ("accuracy", "gain", "difference") for part in ("", "_low", "_high")]
    return _csv([*plan.table.axes, "suite", "replicates", *estimates], as_records(found))


def _csv(columns: list[str], lines: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def table_text(plan: Plan, found: Sequence[Row]) -> str:
    """For a terminal."""
    if not found:
        return "no run with an evaluation is finished"
    several = max(row.replicates for row in found) > 1
    over = "seeds or runs, where n is 1 over prompts" if several else "prompts"
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
