"""The charts of the report, as plotly traces and layouts."""

from __future__ import annotations

import html
import re
from typing import Any

import numpy as np

from megarl.storage.checked_json import Record
from megarl.views.report.curves import BY_COLUMN, CURVES, LOGARITHMIC, PERCENT
from megarl.views.report.pages import COLOURS, Chart, colour, line, with_bars
from megarl.views.run_reader import Run, muted_by

DASHES = ("solid", "dash", "dashdot", "longdash")  # tell suites and values apart if the page has several runs
PHASE_COLOURS = {"rollout": "#4c8bd6", "optimize": "#e0803a", "evaluate": "#3fa37a"}
POINTS = 1000  # of a curve at most; longer runs are averaged in bins, still finer than a screen shows
BARS = 100  # stages with bars of their own in the chart of times, at most; more share one
SMOOTHING, SHORT_SMOOTHING = 15, 5  # updates in the moving average of the reward; the second for short runs
FEW_UPDATES = 100  # updates of a short run, at most
# Plotly's own ticks from 1 to 2 would be 1.1, 1.2 and so on
SAMPLES = {"type": "log", "title": {"text": "k", "standoff": 6}, "tickvals": [2**n for n in range(20)]}


def make_charts(runs: list[Run]) -> list[Chart]:
    """All charts, in the order of the page; each shows every run that has the data."""
    curves = [
        _accuracy(runs),
        _reward(runs),
        _ratios(runs),
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
        chart.layout["showlegend"] = sum(trace.get("showlegend", True) for trace in chart.traces) > 1
    return charts


def _accuracy(runs: list[Run]) -> Chart:
    chart = Chart(
        "Held-out accuracy",
        "avg@k on prompts that are never trained on; bars are 95 % intervals. Gains inside the bars are noise.",
        layout={"yaxis": {"tickformat": PERCENT}},
        empty="No evaluation has been made yet."
        if any(run.is_evaluated for run in runs)
        else "The recipe turns evaluation off: eval.every = 0.",
    )
    for number, run in enumerate(runs):
        for order, (suite, evaluations) in enumerate(run.suites.items()):
            name = " ".join([run.name] * (len(runs) > 1) + [suite] * (len(run.suites) > 1)) or "held-out accuracy"
            found = _some(evaluations)
            x, y = [e["update"] for e in found], [e["accuracy"] for e in found]
            trace = with_bars(number, x, y, [e["ci95"] for e in found], name)
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


def _reward(runs: list[Run]) -> Chart:
    longest = max((len(run.column("reward/mean")[0]) for run in runs), default=0)
    window = SMOOTHING if longest > FEW_UPDATES else SHORT_SMOOTHING
    chart = Chart(
        "Training reward",
        f"Mean reward of an update's responses, averaged over {window} updates (faint: each update). In a staged "
        "run one policy generated all data of a stage, so look for steps between stages, not for slopes within.",
        layout={"yaxis": {"rangemode": "tozero"}},
        empty="No update has been made yet.",
    )
    for number, run in enumerate(runs):
        x, y = run.column("reward/mean")
        if x:
            faint = {"opacity": 0.25, "showlegend": False, "hoverinfo": "skip"}
            smooth = smoothed(x, y, run.updates_per_stage, window)
            chart.traces += [line(number, *_thin(x, y)) | faint, line(number, *_thin(x, smooth))]
            chart.traces[-1]["name"] = html.escape(run.name) if len(runs) > 1 else "reward"
    return chart


def _ratios(runs: list[Run]) -> Chart:
    chart = Chart(
        "Importance ratio quantiles",
        "Probability of the trained tokens now, over that when they were generated: median and outer quantiles, "
        "logarithmic. The fan opens with staleness and closes at a stage boundary; if it gets wider from stage to "
        "stage, that is drift.",
        layout={"yaxis": LOGARITHMIC},
    )
    for number, run in enumerate(runs):
        names = sorted((name for record in run.updates[-1:] for name in record if _quantile(name)), key=_quantile)
        if len(runs) > 1 and len(names) > 3:  # fans of several runs would hide each other
            names = [names[0], names[len(names) // 2], names[-1]]
        for low, high in zip(names[: len(names) // 2], reversed(names[(len(names) + 1) // 2 :]), strict=True):
            fan = {"fill": "tonexty", "fillcolor": colour(number) + "22"} if len(runs) == 1 else {}
            for name, fill in ((low, {}), (high, fan)):
                curve = line(number, *_thin(*run.column(name)))
                curve |= {"name": _label(runs, run, name.removeprefix("ratio/")), "showlegend": False, **fill}
                chart.traces.append(
                    curve | {"line": {"width": 0.6 if len(runs) == 1 else 1.2, "color": colour(number)}}
                )
        if len(names) % 2:
            middle = line(number, *_thin(*run.column(names[len(names) // 2])))
            chart.traces.append(middle | {"name": _label(runs, run, "median" if len(runs) == 1 else "")})
    return chart


def _quantile(name: str) -> int:
    """50 for "ratio/q50" and "ratio/p50"; 0 for the extremes, which depend on a single token, and for other metrics."""
    match = re.fullmatch(r"ratio/[pq](\d\d)", name)
    return int(match[1]) if match else 0


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
    with a curve for each of the most frequent values."""
    names = dict.fromkeys(name for run in runs for record in run.updates for name in record if name.startswith("by/"))
    charts = []
    for column in dict.fromkeys(name.split("/")[1] for name in names):
        values = list(dict.fromkeys(name.split("/")[2] for name in names if name.split("/")[1] == column))
        shown, several = sorted(values[: len(COLOURS)]), len(runs) > 1
        charts.append(_heldout_by(runs, column, shown))
        more = f" The {len(shown)} most frequent of {len(values)} values." if len(values) > len(shown) else ""
        for quantity, (title, hint, yaxis) in BY_COLUMN.items():
            curves = {
                f"by/{column}/{value}/{quantity}": (value, DASHES[order % len(DASHES)] if several else "solid")
                for order, value in enumerate(shown)
            }
            charts.append(
                _lines(runs, f"{title} by {column}", hint + more, curves, window=SHORT_SMOOTHING, yaxis=yaxis)
            )
    return charts


def _heldout_by(runs: list[Run], column: str, values: list[str]) -> Chart:
    chart = Chart(
        f"Held-out accuracy by {column}",
        "avg@k on the prompts with each value of the column, on the first suite.",
        layout={"yaxis": {"rangemode": "tozero", "tickformat": PERCENT}},
    )
    for number, run in enumerate(runs):
        for order, value in enumerate(values):
            name = f"by/{column}/{value}/accuracy"
            if found := [evaluation for evaluation in run.evaluations if name in evaluation]:
                chart.traces.append(line(number, [e["update"] for e in found], [e[name] for e in found]))
                chart.traces[-1]["name"] = _label(runs, run, value)
                chart.traces[-1]["line"] = _suite_line(runs, number, order)
    return chart


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
    few = max(run.stages for run in runs) <= BARS
    seconds: dict[str, dict[tuple[str, str], float]] = {}  # {phase: {(run, its stage): seconds}}
    for run in runs:
        for (stage, phase), s in sorted(run.phase_seconds.items()):
            place = "end" if stage >= run.stages else f"stage {stage + 1}" if few else "all stages"
            bars = seconds.setdefault(phase, {})
            bars[run.name, place] = bars.get((run.name, place), 0.0) + s
    for phase in sorted(seconds, key=lambda phase: [*PHASE_COLOURS, phase].index(phase)):
        names, places = map(list, zip(*seconds[phase], strict=True))
        chart.traces.append(
            {
                "type": "bar",
                "name": html.escape(phase),
                "x": [list(map(html.escape, names)), places] if len(runs) > 1 else places,
                "y": list(seconds[phase].values()),
                "marker": {"color": PHASE_COLOURS.get(phase, "#888888")},
                "hovertemplate": "%{x}: %{y:.1f} s",
            }
        )
    return chart


def _stages(runs: list[Run]) -> dict[str, Any]:
    """Layout that shades every other stage and names stages, if all runs have stages of the same size."""
    if len({run.updates_per_stage for run in runs}) > 1:
        return {}
    size, count = runs[0].updates_per_stage, max(run.stages for run in runs)
    if count > BARS:
        return {}  # a stage would be narrower than a line
    shade = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 0}, "layer": "below"}
    edge = shade | {"type": "line", "line": {"width": 1, "dash": "dot", "color": "#88888888"}}
    shapes = [shade | {"x0": k * size, "x1": (k + 1) * size, "fillcolor": "#88888812"} for k in range(1, count, 2)]
    shapes += [edge | {"x0": k * size, "x1": k * size} for k in range(1, count)]
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


def _some(evaluations: list[Record]) -> list[Record]:
    """At most POINTS / 4 of the evaluations, evenly spaced, and the last one; points with error bars need more room."""
    width = -(-4 * len(evaluations) // POINTS) or 1
    return [*evaluations[:-1:width], *evaluations[-1:]]


def _thin(x: list[int], y: list[float]) -> tuple[list[int], list[float]]:
    """The curve with at most POINTS points, each the mean of a bin of neighbours."""
    width = -(-len(x) // POINTS) or 1
    bins = [slice(i, i + width) for i in range(0, len(x), width)]
    return [x[b][-1] for b in bins], [float(f"{sum(y[b]) / len(y[b]):.6g}") for b in bins]
