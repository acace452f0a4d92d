"""The charts of the report, as plotly traces and layouts."""

from __future__ import annotations

import html
from typing import Any

import numpy as np

from megarl.views.report.curves import BY_COLUMN, CURVES, PERCENT
from megarl.views.report.pages import COLOURS, Chart, colour, line, with_bars
from megarl.views.run_reader import Run, muted_by

DASHES = ("solid", "dash", "dashdot", "longdash")  # tell suites and values apart if the page has several runs
PHASE_COLOURS = {"rollout": "#4c8bd6", "optimize": "#e0803a", "evaluate": "#3fa37a"}
POINTS = 1000  # of a curve at most; longer runs are averaged in bins, still finer than a screen shows
SMOOTHING = 5  # updates in the moving averages of rewards and of metrics by columns of the prompts
STAGES = 100  # that are shaded, at most; more would be narrower than a line
# Plotly's own ticks from 1 to 2 would be 1.1, 1.2 and so on
SAMPLES = {"type": "log", "title": {"text": "k", "standoff": 6}, "tickvals": [2**n for n in range(20)]}


def make_charts(runs: list[Run]) -> list[Chart]:
    """All charts, in the order of the page; each shows every run that has the data."""
    curves = [
        _accuracy(runs),
        _lines(
            runs,
            "Training reward",
            f"Mean reward of an update's responses, averaged over {SMOOTHING} updates. In a staged run one policy "
            "generated all data of a stage, so look for steps between stages, not for slopes within.",
            {"reward/mean": ("reward", "solid")},
            SMOOTHING,
            yaxis={"rangemode": "tozero"},
        ),
        _fractions(runs),
        *_by_columns(runs),
        *(_lines(runs, title, hint, metrics, yaxis=yaxis) for title, hint, metrics, yaxis in CURVES),
    ]
    for chart in curves:
        first, last = min(run.begins for run in runs), max(run.last for run in runs)
        margin = 0.01 * (last - first)
        xaxis = {"title": {"text": "update", "standoff": 6}, "range": [first - margin, last + margin]}
        chart.layout = {"xaxis": xaxis, **_stages(runs), **chart.layout}
    charts = [*curves[:1], _pass_at(runs), *curves[1:], _phase_times(runs)]
    for chart in charts:
        chart.layout["showlegend"] = len(chart.traces) > 1
    return charts


def _accuracy(runs: list[Run]) -> Chart:
    chart = Chart(
        "Held-out accuracy",
        "avg@k on prompts that are never trained on; bars are 95 % intervals. Gains inside the bars are noise.",
        layout={"yaxis": {"tickformat": PERCENT}},
    )
    for number, run in enumerate(runs):
        for order, (suite, evaluations) in enumerate(run.suites.items()):
            name = " ".join([run.name] * (len(runs) > 1) + [suite] * (len(run.suites) > 1)) or "held-out accuracy"
            x, y = [e["update"] for e in evaluations], [e["accuracy"] for e in evaluations]
            trace = with_bars(number, x, y, [e["ci95"] for e in evaluations], name)
            chart.traces.append(trace | {"line": _suite_line(runs, number, order)})
    return chart


def _pass_at(runs: list[Run]) -> Chart:
    """pass@k of the first and the last policy that was evaluated on each suite."""
    chart = Chart(
        "pass@k",
        "Share of prompts with a right response among k. A policy that only sharpens what the base model (dotted) can "
        "already do gains at k = 1 but not at large k.",
        layout={"yaxis": {"tickformat": PERCENT}, "xaxis": SAMPLES},
    )
    for number, run in enumerate(runs):
        for order, (suite, evaluations) in enumerate(run.suites.items()):
            curves = [e for e in evaluations if "pass_at" in e]
            for event in {e["update"]: e for e in [*curves[:1], *curves[-1:]]}.values():
                passed = event["pass_at"]
                trace = line(number, list(range(1, len(passed) + 1)), passed)
                trace["line"] = _suite_line(runs, number, order) | ({"dash": "dot"} if event["update"] == 0 else {})
                trace["name"] = _label(runs, run, f"{suite}, update {event['update']}")
                chart.traces.append(trace)
    return chart


def _suite_line(runs: list[Run], number: int, order: int) -> dict[str, Any]:
    """Style of suite ``order`` of run ``number``: with several runs a colour per run, else a colour per suite."""
    if len(runs) == 1:
        return {"width": 1.8, "color": colour(order)}
    return {"width": 1.8, "color": colour(number), "dash": DASHES[order % len(DASHES)]}


def _fractions(runs: list[Run]) -> Chart:
    causes = muted_by(record for run in runs for record in run.updates)
    return _lines(
        runs,
        "Clipped, vetoed and masked tokens",
        "Share of the trained tokens that clip, veto or mask take out; of objectives that bound a weight instead, such "
        "as minpro, of those with a bounded one. Near 1, little is left to learn from before the stage is over.",
        {
            name: (cause.replace("_", " "), DASHES[order % len(DASHES)])
            for order, (name, cause) in enumerate(causes.items())
        },
        yaxis={"rangemode": "tozero", "tickformat": PERCENT},
    )


def _by_columns(runs: list[Run]) -> list[Chart]:
    """Charts of the metrics by columns of the prompts, ``by/COLUMN/VALUE/QUANTITY``: one for each column and quantity,
    with a curve for each of the values that the first updates have most often."""
    charts: dict[str, dict[str, tuple[str, str]]] = {}
    for name in dict.fromkeys(name for run in runs for record in run.updates for name in record):
        if name.startswith("by/"):
            _, column, value, quantity = name.split("/")
            curves = charts.setdefault(f"{BY_COLUMN[quantity]} by {column}", {})
            if len(curves) < len(COLOURS):
                curves[name] = value, DASHES[len(curves) % len(DASHES)]
    hint = f"Means over the responses to prompts with each value of the column, averaged over {SMOOTHING} updates."
    return [
        _lines(runs, title, hint, curves, SMOOTHING, yaxis={"rangemode": "tozero"}) for title, curves in charts.items()
    ]


def _lines(
    runs: list[Run], title: str, hint: str, metrics: dict[str, tuple[str, str]], window: int = 1, **layout: Any
) -> Chart:
    """A chart with one curve per run and metric; ``metrics`` maps a name to its label and dash. window: updates of its
    moving average."""
    chart = Chart(title, hint, layout=layout)
    for number, run in enumerate(runs):
        for order, (metric, (label, dash)) in enumerate(metrics.items()):
            x, y = run.column(metric)
            if x:
                y = smoothed(x, y, run.updates_per_stage, window) if window > 1 else y
                curve = line(number, *_thin(x, y))
                of = colour(number if len(runs) > 1 else order)
                curve |= {
                    "name": _label(runs, run, label) or title.lower(),
                    "line": {"width": 1.6, "color": of, "dash": dash},
                }
                chart.traces.append(curve)
    return chart


def _phase_times(runs: list[Run]) -> Chart:
    chart = Chart(
        "Time per phase",
        "Wall time of each phase, process starts and failed attempts included. The longest part is where a faster "
        "machine helps most.",
        layout={"barmode": "stack", "bargap": 0.4, "yaxis": {"title": {"text": "seconds"}}, "hovermode": "closest"},
    )
    seconds: dict[str, dict[str, float]] = {}  # {phase: {stage, or run if there are several: seconds}}
    for run in runs:
        for (stage, phase), s in sorted(run.phase_seconds.items()):
            place = run.name if len(runs) > 1 else "end" if stage >= run.stages else f"stage {stage + 1}"
            bars = seconds.setdefault(phase, {})
            bars[place] = bars.get(place, 0.0) + s
    for phase in sorted(seconds, key=lambda phase: [*PHASE_COLOURS, phase].index(phase)):
        chart.traces.append(
            {
                "type": "bar",
                "name": html.escape(phase),
                "x": list(map(html.escape, seconds[phase])),
                "y": list(seconds[phase].values()),
                "marker": {"color": PHASE_COLOURS.get(phase, "#888888")},
                "hovertemplate": "%{x}: %{y:.1f} s",
            }
        )
    return chart


def _stages(runs: list[Run]) -> dict[str, Any]:
    """Layout that shades every other stage and names stages, if all runs have stages of the same size."""
    size, count = runs[0].updates_per_stage, max(run.stages for run in runs)
    if len({run.updates_per_stage for run in runs}) > 1 or count > STAGES:
        return {}
    shade = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 0}, "layer": "below"}
    shapes = [shade | {"x0": k * size, "x1": (k + 1) * size, "fillcolor": "#88888812"} for k in range(1, count, 2)]
    label = {"yref": "paper", "y": 1, "yanchor": "bottom", "showarrow": False, "font": {"size": 10}, "opacity": 0.7}
    labels = [label | {"x": (k + 0.5) * size, "text": f"stage {k + 1}"} for k in range(count)] if count <= 8 else []
    return {"shapes": shapes, "annotations": labels}


def _label(runs: list[Run], run: Run, label: str) -> str:
    """The name of a curve, as HTML."""
    return html.escape(label if len(runs) == 1 else f"{run.name} {label}".strip())


def smoothed(x: list[int], y: list[float], stage: int, window: int) -> list[float]:
    """Centred moving average over ``window`` updates that does not reach over a stage boundary."""
    sums, stages, places = np.cumsum([0.0, *y]), (np.array(x) - 1) // stage, np.arange(len(x))
    low = np.maximum(np.searchsorted(stages, stages), places - window // 2)
    high = np.minimum(np.searchsorted(stages, stages, "right"), places + window // 2 + 1)
    smooth: list[float] = ((sums[high] - sums[low]) / (high - low)).tolist()
    return smooth


def _thin(x: list[int], y: list[float]) -> tuple[list[int], list[float]]:
    """The curve with at most POINTS points, each the mean of a bin of neighbours."""
    width = -(-len(x) // POINTS) or 1
    bins = [slice(i, i + width) for i in range(0, len(x), width)]
    return [x[b][-1] for b in bins], [float(f"{sum(y[b]) / len(y[b]):.6g}") for b in bins]
