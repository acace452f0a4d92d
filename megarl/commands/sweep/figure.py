"""The figure of a sweep: accuracy, gain and difference from the baseline of all points, beside each other."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path

from megarl.commands.sweep.plan import SweepPlan
from megarl.commands.sweep.results import Row
from megarl.storage.files import write_atomic
from megarl.views.report.pages import Chart, page, table, with_bars


def write_figure(plan: SweepPlan, found: Sequence[Row], output: Path) -> None:
    """Write a self-contained HTML page with the charts of all suites and a table."""
    charts = [
        chart
        for suite in dict.fromkeys(row.suite for row in found)
        for chart in _charts(plan.table.reference, [row for row in found if row.suite == suite], suite)
    ]
    rows = [[row.point.name, row.suite, str(row.replicates), *row.texts()] for row in found]
    cells = [list(map(html.escape, row)) for row in rows]
    summary = table("summary", ("Point", "Suite", "Runs", "Accuracy", "Gain", "Difference"), cells)
    write_atomic(output, page(html.escape(plan.output.name), "", summary, charts))


def _charts(reference: str, found: Sequence[Row], suite: str) -> list[Chart]:
    """The charts of one suite: accuracy, gain, and difference from the baseline."""
    kinds = (
        ("accuracy", f"Accuracy on {suite}", "Accuracy of the result of each run; bars are 95 % intervals."),
        ("gain", f"Gain on {suite}", "Paired gain over the policy that a run began with; bars are 95 % intervals."),
        (
            "difference",
            f"Difference from {reference} on {suite}",
            "Paired over shared seeds or rollouts; bars are 95 % intervals. A bar that crosses 0 may be noise.",
        ),
    )
    charts = []
    for name, title, hint in kinds:
        values = [(html.escape(row.point.name), estimate) for row in found if (estimate := getattr(row, name))]
        means = [estimate.mean for _, estimate in values]
        bounds = [[one.mean] * 2 if math.isnan(one.ci95[0]) else one.ci95 for _, one in values]
        trace = with_bars(0, [point for point, _ in values], means, bounds) | {"mode": "markers"}
        layout = {"yaxis": {"tickformat": ".0%"}, "showlegend": False, "hovermode": "closest"}
        charts.append(Chart(title, hint, [trace], layout))
    return charts
