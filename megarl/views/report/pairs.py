"""Charts and columns of the report that compare runs: differences at equal updates, and means over seeds."""

from __future__ import annotations

import html
from typing import Any

import numpy as np

from megarl.errors import UserError
from megarl.estimates import Difference, mean_of_replicates
from megarl.views.comparison import difference
from megarl.views.report.curves import PERCENT
from megarl.views.report.pages import Chart, colour, line, with_bars
from megarl.views.run_reader import Run

MEANS = {  # title of a chart of means over seeds -> metric
    "Held-out accuracy": "accuracy",
    "Training reward": "reward/mean",
    "Entropy": "entropy",
    "Gradient norm": "grad_norm",
}
POINTS = 8  # updates at which two runs are compared, at most; each one reads all responses of two evaluations


def equal_updates(runs: list[Run]) -> list[int]:
    """Updates after which all runs were evaluated on their first suite, from where all of them have own updates."""
    versions = [{event["update"] for event in run.evaluations} for run in runs]
    return sorted(update for update in set.intersection(*versions) if update > max(run.begins for run in runs))


def differences(runs: list[Run], updates: list[int]) -> dict[int, dict[int, Difference]]:
    """{number of a run: {update: its accuracy minus the first run's, paired}}, for all runs but the first.

    Runs with other prompts, or whose responses are gone, are left out.
    """
    found: dict[int, dict[int, Difference]] = {}
    for number, run in enumerate(runs[1:] if updates else [], 1):
        try:
            suite = next(iter(run.suites))
            found[number] = {update: difference(runs[0].root, update, run.root, update, suite) for update in updates}
        except UserError:
            continue
    return found


def pair_columns(runs: list[Run]) -> list[dict[str, str]]:
    """Cells of the summary for each run: its accuracy at the last equal update, and its difference from the first."""
    last = equal_updates(runs)[-1:] if len(runs) > 1 else []
    if not last:
        return [{} for _ in runs]
    found = differences(runs, last)
    cells = []
    for number, run in enumerate(runs):
        accuracy = next(event["accuracy"] for event in run.evaluations if event["update"] == last[0])
        one = found.get(number, {}).get(last[0])
        text = one.text() if one else "-"
        cells.append({f"At update {last[0]:,}": f"{accuracy:.3f}", f"Difference from {runs[0].name}": text})
    return cells


def why_no_differences(runs: list[Run]) -> str:
    """Why several runs have no chart of differences."""
    if not equal_updates(runs):
        return "no differences in accuracy: the runs were never evaluated after the same number of updates of their own"
    return "no differences in accuracy: the runs were evaluated on other prompts, or their responses are gone"


def pair_charts(runs: list[Run]) -> list[Chart]:
    """The chart of differences from the first run and those of means over seeds; without traces if there are none."""
    charts = [_differences(runs)]
    for title, metric in MEANS.items():
        chart = Chart(
            f"{title}, mean over seeds",
            "Runs that differ only in their seed; the band is the 95 % interval of their mean.",
            layout={"xaxis": {"title": {"text": "update", "standoff": 6}}},
        )
        for number, group in enumerate(_of_seeds(runs)):
            chart.traces += _band(number, group, metric)
        chart.layout["showlegend"] = len(chart.traces) > 3
        charts.append(chart)
    return charts


def _differences(runs: list[Run]) -> Chart:
    chart = Chart(
        f"Held-out accuracy minus that of {runs[0].name}",
        "After equal numbers of updates, on the same prompts; bars are paired 95 % intervals over prompts. A "
        "difference whose bar crosses 0 may be noise.",
        layout={
            "yaxis": {"tickformat": "+" + PERCENT, "rangemode": "tozero"},
            "xaxis": {"title": {"text": "update", "standoff": 6}},
        },
    )
    updates = equal_updates(runs) if len(runs) > 1 else []
    step = -(-len(updates) // POINTS) or 1
    for number, by_update in differences(runs, updates[::-1][::step][::-1]).items():
        means, bounds = zip(*((one.mean, one.ci95) for one in by_update.values()), strict=True)
        chart.traces.append(with_bars(number, list(by_update), means, bounds, runs[number].name))
    chart.layout["showlegend"] = len(chart.traces) > 1
    return chart


def _of_seeds(runs: list[Run]) -> list[list[Run]]:
    """Groups of two or more runs that differ only in their seed and the path of their first policy."""
    kinds: dict[str, list[Run]] = {}
    for run in runs:
        settings = {key: value for key, value in run.settings.items() if key not in ("run.seed", "model.path")}
        kinds.setdefault(repr((sorted(settings.items()), run.begins)), []).append(run)
    return [kind for kind in kinds.values() if len(kind) > 1]


def _band(number: int, runs: list[Run], metric: str) -> list[dict[str, Any]]:
    """Traces of the bounds, filled between, and of the mean, for updates at which all runs have a value, in bins."""
    values = [
        {e["update"]: e["accuracy"] for e in run.evaluations}
        if metric == "accuracy"
        else dict(zip(*run.column(metric), strict=True))
        for run in runs
    ]
    shared = sorted(set.intersection(*map(set, values)))
    width = -(-len(shared) // 200) or 1
    bins = [shared[i : i + width] for i in range(0, len(shared), width)]
    means = [mean_of_replicates(np.array([np.mean([one[u] for u in bin]) for one in values])) for bin in bins]
    x = [bin[-1] for bin in bins]
    hidden = {"showlegend": False, "hoverinfo": "skip", "line": {"width": 0, "color": colour(number)}}
    low, high = (line(number, x, [bounds[k] for _, bounds in means]) | hidden for k in (0, 1))
    high |= {"fill": "tonexty", "fillcolor": colour(number) + "33"}
    name = html.escape(f"{runs[0].name} and {len(runs) - 1} more")
    return [low, high, line(number, x, [mean for mean, _ in means]) | {"name": name}]
