"""Tables and figures of the lab from lab/results.tar.xz: python -m lab.figures.

Writes build/lab_tables.md, and docs/lab/*.svg, these with playwright and a chromium on the path.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.results import Sweep, Value, at, difference, estimate, last
from lab.tables import ONE_STAGE, SETS, STALENESS, read_all, sizes_of, text
from megarl.views.report.pages import COLOURS, Chart, page
from tools.chart_svg import charts_svg

TABLES, FIGURES = Path("build/lab_tables.md"), Path("docs/lab")
CLIPS = ("reinforce", "grpo", "grpo_tight", "dapo", "gppo", "dcpo", "gspo", "sapo")
STALE = ("reinforce", "grpo", "mu_grpo", "m2po", "minpro", "pr_grpo", "bapo", "dppo")
SCOPES = ("mu_grpo_none", "mu_grpo_trigger", "mu_grpo_rest", "mu_grpo_suffix", "mu_grpo")
MUTED = ("grpo", "grpo_tight", "dapo", "bapo", "dppo", "m2po_low", "m2po", "m2po_high")


def charts(sweeps: Mapping[str, Sweep]) -> dict[str, Chart]:
    """By the name of the file."""
    found = {}
    for name in ONE_STAGE:
        found[f"{name}_stale"] = _curves(sweeps[name], STALE, "accuracy", "Accuracy, made for staleness")
        found[f"{name}_ess"] = _curves(sweeps[name], STALE, "ess", "Effective sample size")
    for name in ("frozen", "frozen_low", "learn"):  # `long` has too few points for these
        sweep = sweeps[name]
        found[f"{name}_clips"] = _curves(sweep, CLIPS, "accuracy", "Accuracy, clips")
        found[f"{name}_scopes"] = _curves(sweep, SCOPES, "accuracy", "Accuracy, scopes of mu-GRPO's veto")
        found[f"{name}_muted"] = _curves(sweep, MUTED, "kept_fraction", "Tokens with a gradient")
        found[f"{name}_final"] = _final(sweep)
    found["rates"] = _rates(sweeps)
    for name in STALENESS:
        if name in sweeps:
            found[name] = _staleness(sweeps[name])
    if "frozen_1024" in sweeps:
        sweep = sweeps["frozen_1024"]
        found["frozen_1024"] = _curves(sweep, sweep.points, "accuracy", "Accuracy in one stage of 1024 updates")
    for name, title in (("schedules", "Gain by learning-rate schedule"), ("grid_sizes", "Gain by model")):
        if name in sweeps:
            found[name] = _settings(sweeps[name], title)
    return {name: chart for name, chart in found.items() if chart.traces}


def _curves(sweep: Sweep, points: Sequence[str], metric: str, title: str) -> Chart:
    """Means over all seeds along the updates of the stage, which are the staleness."""
    chart = Chart(title, "", layout={"xaxis": {"title": {"text": "updates on the frozen rollouts"}}})
    for number, point in enumerate(points):
        updates = sorted({u for seed in sweep.seeds for u in sweep.curve(point, seed, metric)})
        updates = [u for u in updates if u % 32 == 0]
        values = [(u, at(point, u, metric)) for u in updates]
        _add(chart, sweep, sweep.seeds, number, point, values)
    return chart


def _add(
    chart: Chart, sweep: Sweep, seeds: Sequence[int], number: int, name: str, values: Sequence[tuple[Any, Value]]
) -> None:
    found = [(x, result) for x, value in values if (result := estimate(sweep, seeds, value)) is not None]
    if not found:
        return
    bars = [result.ci95[1] - result.mean for _, result in found]
    chart.traces.append(
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": name,
            "x": [x for x, _ in found],
            "y": [round(result.mean, 4) for _, result in found],
            "marker": {"size": 6},
            "line": {"width": 1.8, "color": COLOURS[number % len(COLOURS)]},
            "error_y": {"type": "data", "array": [round(bar, 4) for bar in bars], "thickness": 1},
        }
    )


def _gain(point: str) -> Value:
    return difference(last(point), at(point, 0))


def _markers(chart: Chart) -> Chart:
    """Points that no line joins, since they are in no order."""
    for trace in chart.traces:
        trace["mode"] = "markers"
    return chart


def _final(sweep: Sweep) -> Chart:
    """What each point gained, on both sets of seeds."""
    chart = Chart("Gain after one stage", "")
    for number, seeds in enumerate(SETS):
        values = [(point, _gain(point)) for point in sweep.points]
        _add(chart, sweep, seeds, number, f"seeds {seeds[0]} to {seeds[-1]}", values)
    return _markers(chart)


def _rates(sweeps: Mapping[str, Sweep]) -> Chart:
    """What each objective gained at both learning rates."""
    chart = Chart("Gain after one stage, at two learning rates", "")
    for number, (name, rate) in enumerate((("frozen", "lr 5e-4"), ("frozen_low", "lr 2e-4"))):
        sweep = sweeps[name]
        _add(chart, sweep, sweep.seeds, number, rate, [(point, _gain(point)) for point in sweep.points])
    return _markers(chart)


def _settings(sweep: Sweep, title: str) -> Chart:
    """What each objective gained with every value of the first axis."""
    settings = list(dict.fromkeys(point.partition(",")[0] for point in sweep.points))
    objectives = list(dict.fromkeys(point.partition(",")[2] for point in sweep.points))
    chart = Chart(title, "", layout={"xaxis": {"tickvals": list(range(len(settings))), "ticktext": settings}})
    for number, name in enumerate(objectives):
        # beside each other, so that intervals can be told apart
        values = [(place + 0.08 * (number - 1.5), _gain(f"{s},{name}")) for place, s in enumerate(settings)]
        _add(chart, sweep, sweep.seeds, number, name, values)
    return _markers(chart)


def _staleness(sweep: Sweep) -> Chart:
    sizes = sizes_of(sweep)
    xaxis = {"title": {"text": "updates in a stage"}, "type": "log", "tickvals": sizes}
    chart = Chart(f"Accuracy after {max(sizes, default=0)} updates", "", layout={"xaxis": xaxis})
    for number, name in enumerate(dict.fromkeys(point.partition(",")[0] for point in sweep.points)):
        # beside each other, so that intervals can be told apart
        values = [(round(size * 1.03 ** (number - 2), 2), last(f"{name},{size}")) for size in sizes]
        _add(chart, sweep, sweep.seeds, number, name, values)
    return chart


def write(sweeps: Mapping[str, Sweep]) -> None:
    """Tables and figures."""
    TABLES.parent.mkdir(exist_ok=True)
    TABLES.write_text(text(sweeps))
    found = charts(sweeps)
    for chart in found.values():
        chart.layout |= {"title": {"text": chart.title, "x": 0.02}, "showlegend": True, "margin": {"t": 48, "b": 110}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(page("lab", "", "", list(found.values())))
        drawn = charts_svg(path, range(len(found)))
    FIGURES.mkdir(exist_ok=True)
    for name, svg in zip(found, drawn, strict=True):
        (FIGURES / f"{name}.svg").write_text(svg)


if __name__ == "__main__":
    write(read_all())
