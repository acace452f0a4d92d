"""The figure of a sweep: accuracy, gain and difference from the baseline, over a numeric axis if the sweep has one."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.commands.sweep.plan import SweepPlan
from megarl.commands.sweep.results import Estimate, Row
from megarl.recipe.sweep import Point, SweepTable
from megarl.storage.files import write_atomic
from megarl.views.report.pages import Chart, colour, error_bars, page, table


def write_figure(plan: SweepPlan, found: Sequence[Row], output: Path) -> None:
    """Write a self-contained HTML page with the charts of all suites and a table."""
    charts = [
        chart
        for suite in dict.fromkeys(row.suite for row in found)
        for chart in charts_of(plan.table, [row for row in found if row.suite == suite], suite)
    ]
    write_atomic(output, page(html.escape(plan.output.name), "", _table(found), charts))


def charts_of(table: SweepTable, found: Sequence[Row], suite: str) -> list[Chart]:
    """The charts of one suite: accuracy, gain, and difference from the baseline."""
    kinds = (
        ("accuracy", f"Accuracy on {suite}", "Accuracy of the result of each run; bars are 95 % intervals."),
        ("gain", f"Gain on {suite}", "Paired gain over the policy that a run began with; bars are 95 % intervals."),
        (
            "difference",
            f"Difference from {table.reference} on {suite}",
            "Paired over shared seeds or rollouts; bars are 95 % intervals. A bar that crosses 0 may be noise.",
        ),
    )
    along = _numbers(table)
    charts = []
    for name, title, hint in kinds:
        chart = Chart(html.escape(title), html.escape(hint), layout={"yaxis": {"tickformat": ".0%"}})
        values = [(row.point, estimate) for row in found if (estimate := getattr(row, name))]
        for number, (label, points) in enumerate(_lines(values, along).items()):
            chart.traces.append(_trace(number, label, points, along))
        chart.layout["showlegend"] = len(chart.traces) > 1
        chart.layout["hovermode"] = "closest"
        if along:
            low, high = (pick(float(row.point.values[along]) for row in found) for pick in (min, max))
            kind = {"type": "log", "dtick": "D2"} if low > 0 and high >= 8 * low else {}
            chart.layout["xaxis"] = {"title": {"text": html.escape(along), "standoff": 6}, **kind}
        charts.append(chart)
    return charts


def _numbers(table: SweepTable) -> str | None:
    """The name of the first axis that has two or more values, all numbers."""
    for name, axis in table.axes.items():
        if isinstance(axis, list) and len(axis) > 1 and all(type(value) in (int, float) for value in axis):
            return name
    return None


def _lines(values: list[tuple[Point, Estimate]], along: str | None) -> dict[str, list[tuple[Point, Estimate]]]:
    """{label: points} of each line of a chart: one line per combination of the axes other than ``along``.

    Without a numeric axis (``along`` is None) all points are in one line, beside each other.
    """
    lines: dict[str, list[tuple[Point, Estimate]]] = {}
    for point, estimate in values:
        others = [str(value) for axis, value in point.values.items() if axis != along]
        lines.setdefault(", ".join(others) if along else "", []).append((point, estimate))
    return lines


def _trace(number: int, label: str, points: list[tuple[Point, Estimate]], along: str | None) -> dict[str, Any]:
    means = [estimate.mean for _, estimate in points]
    known = [estimate.ci95[0] == estimate.ci95[0] for _, estimate in points]  # not NaN
    bars = [
        estimate.ci95 if is_known else [estimate.mean] * 2
        for is_known, (_, estimate) in zip(known, points, strict=True)
    ]
    return {
        "type": "scatter",
        "mode": "lines+markers" if along else "markers",
        "name": html.escape(label),
        "x": [point.values[along] if along else html.escape(point.name) for point, _ in points],
        "y": means,
        "marker": {"size": 8},
        "line": {"width": 1.8, "color": colour(number)},
        "error_y": error_bars(means, bars),
        "customdata": [[low, high] for low, high in bars],
        "hovertemplate": "%{x}: %{y:.3f}  [%{customdata[0]:.3f}, %{customdata[1]:.3f}]",
    }


def _table(found: Sequence[Row]) -> str:
    rows = []
    for row in found:
        gain = row.gain.text("+") if row.gain else "-"
        difference = row.difference.text("+") if row.difference else "-"
        cells = [row.point.name, row.suite, str(row.replicates), row.accuracy.text(), gain, difference]
        rows.append(list(map(html.escape, cells)))
    return table("summary", ("Point", "Suite", "Runs", "Accuracy", "Gain", "Difference"), rows)
