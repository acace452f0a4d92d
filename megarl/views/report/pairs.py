"""The chart and the columns of the report that compare runs: differences at equal updates."""

from __future__ import annotations

from megarl.errors import UserError
from megarl.estimates import Difference
from megarl.views.comparison import difference
from megarl.views.report.curves import PERCENT
from megarl.views.report.pages import Chart, with_bars
from megarl.views.run_reader import Run

POINTS = 8  # updates at which two runs are compared, at most; each one reads all responses of two evaluations


def compared_suite(runs: list[Run]) -> str:
    """The first suite of the first run on which all runs were evaluated; "" if there is none."""
    return next((suite for suite in runs[0].suites if all(suite in run.suites for run in runs)), "")


def equal_updates(runs: list[Run]) -> list[int]:
    """Updates after which all runs were evaluated on `compared_suite`, from where all of them have own updates."""
    suite = compared_suite(runs)
    versions = [{event["update"] for event in run.suites.get(suite, [])} for run in runs]
    return sorted(update for update in set.intersection(*versions) if update > max(run.begins for run in runs))


def differences(runs: list[Run], updates: list[int]) -> dict[int, dict[int, Difference]]:
    """{number of a run: {update: its accuracy minus the first run's, paired}}, for all runs but the first.

    Runs with other prompts, or whose responses are gone, are left out.
    """
    found: dict[int, dict[int, Difference]] = {}
    suite = compared_suite(runs)
    for number, run in enumerate(runs[1:] if updates else [], 1):
        try:
            found[number] = {update: difference(runs[0].root, update, run.root, update, suite) for update in updates}
        except UserError:
            continue
    return found


def pair_columns(runs: list[Run]) -> list[dict[str, str]]:
    """Cells of the summary for each run: its accuracy at the last equal update, and its difference from the first."""
    last = equal_updates(runs)[-1:] if len(runs) > 1 else []
    if not last:
        return [{} for _ in runs]
    found, suite = differences(runs, last), compared_suite(runs)
    cells = []
    for number, run in enumerate(runs):
        accuracy = next(event["accuracy"] for event in run.suites[suite] if event["update"] == last[0])
        one = found.get(number, {}).get(last[0])
        text = one.text() if one else "-"
        cells.append({f"At update {last[0]:,}": f"{accuracy:.3f}", f"Difference from {runs[0].name}": text})
    return cells


def why_no_differences(runs: list[Run]) -> str:
    """Why several runs have no chart of differences."""
    if not equal_updates(runs):
        return "no differences in accuracy: the runs were never evaluated after the same number of updates of their own"
    return "no differences in accuracy: the runs were evaluated on other prompts, or their responses are gone"


def pair_chart(runs: list[Run]) -> Chart:
    """Differences from the first run; without traces if there are none."""
    chart = Chart(
        f"Accuracy on {compared_suite(runs) or 'held-out prompts'} minus that of {runs[0].name}",
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
