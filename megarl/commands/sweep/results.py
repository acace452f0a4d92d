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
from megarl.storage.checked_json import Record
from megarl.views.comparison import scores
from megarl.views.run_reader import Run, muted_by, read_run

# metrics of the update before an evaluation that runs.csv contains
LAST = ("reward/mean", "entropy", "ess", "grad_norm")
_Policy = tuple[Path, Record]  # the directory of a run, and the evaluation of one of its policies
# a point, a suite, the number of its replicates, and estimates over them: see `_estimates`
Row = tuple[Point, str, int, dict[str, "Estimate | None"]]


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval."""

    mean: float
    ci95: Interval

    def text(self, sign: str = "") -> str:
        return f"{self.mean:{sign}.3f} [{self.ci95[0]:{sign}.3f}, {self.ci95[1]:{sign}.3f}]"


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
        runs: dict[str, dict[str, Run]] = {}  # by point and replicate
        for each in finished:
            if suite in each.run.suites:
                runs.setdefault(each.job.point.name, {})[each.job.replicate] = each.run
        for point in plan.table.points():
            if point.name in runs:
                reference = runs.get(plan.table.reference, {}) if point.name != plan.table.reference else {}
                found.append((point, suite, len(runs[point.name]), _estimates(suite, runs[point.name], reference)))
    return found


def _estimates(suite: str, runs: dict[str, Run], reference: dict[str, Run]) -> dict[str, Estimate | None]:
    """Of the replicates' results: accuracy; gain over the policies that the runs began with; difference from those of
    the baseline, over the replicates that both have."""
    last = {name: (run.root, run.suites[suite][-1]) for name, run in runs.items()}
    first = {name: (run.root, run.suites[suite][0]) for name, run in runs.items()}
    theirs = {name: (run.root, run.suites[suite][-1]) for name, run in reference.items() if name in runs}
    has_gain = all(run.begins == first[name][1]["update"] < last[name][1]["update"] for name, run in runs.items())
    accuracy = _estimate(list(last.values()))
    low, high = accuracy.ci95  # Student's of two replicates is wider than what is possible
    return {
        "accuracy": Estimate(accuracy.mean, [max(low, 0.0), min(high, 1.0)]),
        "gain": _estimate(list(last.values()), list(first.values())) if has_gain else None,
        "difference": _estimate([last[name] for name in theirs], list(theirs.values())) if theirs else None,
    }


def _estimate(policies: list[_Policy], begins: Sequence[_Policy] = ()) -> Estimate:
    """The mean accuracy of a policy of each replicate, or the mean difference from the policies ``begins``.

    Its interval covers other prompts and, with several replicates, other replicates too, by Student's t. If the
    replicates have different prompts, Student's t covers both; that of a single one is then NaN.
    """
    values = [event["accuracy"] for _, event in policies]
    if begins:
        values = [end - event["accuracy"] for end, (_, event) in zip(values, begins, strict=True)]
    elif len(policies) == 1:
        return Estimate(values[0], list(policies[0][1]["ci95"]))
    over_prompts = _over_prompts(policies, begins)
    if len(values) == 1:
        return Estimate(values[0], over_prompts)
    mean, (low, high) = mean_of_replicates(np.array(values))
    below, above = mean - over_prompts[0], over_prompts[1] - mean
    if math.isnan(below):
        return Estimate(mean, [low, high])
    return Estimate(mean, [mean - math.hypot(mean - low, below), mean + math.hypot(high - mean, above)])


def _over_prompts(policies: list[_Policy], begins: Sequence[_Policy]) -> Interval:
    """The interval of `_estimate` over prompts alone; NaN if any prompts differ."""
    try:
        found = scores([(root, event["update"]) for root, event in (*policies, *begins)], policies[0][1]["suite"])
    except UserError:
        return [math.nan, math.nan]
    ours, theirs = found[: len(policies)], found[len(policies) :]
    mean = np.mean([x.mean(1) for x in ours], axis=0)
    if not theirs:
        return estimates.interval(mean, sum(x.shape[1] for x in ours))
    return estimates.paired(np.mean([x.mean(1) for x in theirs], axis=0), mean).ci95


# ------------------------------------------------------------------------------------------------------------- files


def runs_csv(plan: SweepPlan, finished: Sequence[FinishedRun]) -> str:
    """One line per evaluation of a finished run, with the metrics of the update before it."""
    muted = muted_by(record for each in finished for record in each.run.updates)
    names = [*LAST[:-1], *muted, LAST[-1]]
    lines: list[dict[str, Any]] = []
    for each in finished:
        by_update = {record["update"]: record for record in each.run.updates}
        for suite, events in each.run.suites.items():
            for event in events:
                low, high = event["ci95"]
                place = {"replicate": each.job.replicate, "suite": suite, "update": event["update"]}
                found = {"accuracy": event["accuracy"], "low": low, "high": high, "prompts": event.get("prompts")}
                metrics = by_update.get(event["update"], {})
                last = {name: metrics.get(name) for name in names}
                lines.append(each.job.point.values | place | found | last | {"run": str(each.job.directory)})
    return _csv(
        [*plan.table.axes, "replicate", "suite", "update", "accuracy", "low", "high", "prompts", *names, "run"], lines
    )


def as_records(found: Sequence[Row]) -> list[dict[str, Any]]:
    """The table as one object per row; unknown intervals are None."""
    records = []
    for point, suite, replicates, estimates_of_row in found:
        record: dict[str, Any] = {**point.values, "suite": suite, "replicates": replicates}
        for name, estimate in estimates_of_row.items():
            values = [estimate.mean, *estimate.ci95] if estimate else [math.nan] * 3
            for part, value in zip(("", "_low", "_high"), values, strict=True):
                record[name + part] = None if math.isnan(value) else round(value, 6)
        records.append(record)
    return records


def table_csv(plan: SweepPlan, found: Sequence[Row]) -> str:
    """`as_records` as CSV."""
    names = [name + part for name in ("accuracy", "gain", "difference") for part in ("", "_low", "_high")]
    return _csv([*plan.table.axes, "suite", "replicates", *names], as_records(found))


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
    several = max(replicates for _, _, replicates, _ in found) > 1
    over = "seeds and over prompts (if n is 1: over prompts)" if several else "prompts"
    lines = [f"95 % intervals over {over}; differences are paired, from {plan.table.reference}"]
    width = max(len(point.name) for point, *_ in found)
    for shown in dict.fromkeys(suite for _, suite, _, _ in found):
        lines += [shown, f"{'':{width}}   n  {'accuracy':23}  {'gain':26}  difference"]
        for point, suite, replicates, one in found:
            if suite == shown:
                texts = [each.text("+" * (name != "accuracy")) if each else "-" for name, each in one.items()]
                lines.append(f"{point.name:{width}}  {replicates:2}  {texts[0]:23}  {texts[1]:26}  {texts[2]}")
    return "\n".join(lines)
