"""Charts of the last update with detailed metrics (``metrics.detail``): heat maps of counts, and muted tokens."""

from __future__ import annotations

import html
from math import log10
from typing import Any

from megarl.storage.checked_json import Record
from megarl.views.report.pages import Chart
from megarl.views.run_reader import Run

TOKENS = 30  # bars in the chart of muted tokens
# columns and rows as in `megarl.objectives.parts.detail`, which the report does not import, since it loads torch
COLUMNS, ROWS = 32, 16


def detail_charts(runs: list[Run]) -> list[Chart]:
    """Charts of the first run that has such metrics; none if no run has them."""
    for run in runs:
        if record := _last(run):
            of = f" {html.escape(run.name)}, update {record['update']}."
            return [
                _heat_map(
                    record, "entropy_by_ratio", "Entropy against importance ratio", "nats per token",
                    [f"{row / 4:g}" for row in range(ROWS)],
                    "Log of the number of tokens, by the distance of their ratio from 1 and by the entropy at their "
                    "position. The rare tokens far from 1 are those that a clip mutes." + of,
                ),
                _heat_map(
                    record, "probability_by_ratio", "Probability against importance ratio", "probability",
                    [f"2^-{row}" for row in range(ROWS)],
                    "Log of the number of tokens, by the distance of their ratio from 1 and by their present "
                    "probability." + of,
                ),
                _muted_tokens(record, of),
                _loads(record, of),
            ]  # fmt: skip
    return []


def _loads(record: Record, of: str) -> Chart:
    """How often each expert was chosen, for a model with experts."""
    loads = record.get("experts_load") or {"layers": [], "counts": []}
    chart = Chart("Choices of each expert", "Share of a layer's choices by trained tokens, times the experts." + of)
    if loads["counts"]:
        shares = [[n * len(row) / sum(row) for n in row] for row in loads["counts"]]
        trace: dict[str, Any] = {
            "type": "heatmap",
            "z": [[round(share, 3) for share in row] for row in shares],
            "y": [str(layer) for layer in loads["layers"]],
            "customdata": loads["counts"],
            "colorscale": "Viridis",
            "zmin": 0,
            "showlegend": False,
            "hovertemplate": "layer %{y}, expert %{x}: %{z:.2f} (%{customdata} choices)<extra></extra>",
        }
        chart.traces.append(trace)
        chart.layout = {
            "hovermode": "closest",
            "xaxis": {"title": {"text": "expert", "standoff": 6}},
            "yaxis": {"title": {"text": "layer"}, "type": "category"},
        }
    return chart


def _last(run: Run) -> Record | None:
    return next((r for r in reversed(run.updates) if isinstance(r.get("probability_by_ratio"), dict)), None)


def column_labels() -> list[str]:
    """Label of each column: rho - 1 at the edge that is nearer to rho = 1."""
    octaves = ["0", *(f"{2.0 ** (k - 11):.2g}" for k in range(1, COLUMNS // 2))]
    return [*(f"-{edge}" for edge in reversed(octaves)), *(f"+{edge}" for edge in octaves)]


def _heat_map(record: Record, name: str, title: str, axis: str, rows: list[str], hint: str) -> Chart:
    counts = record.get(name, {}).get("counts")
    chart = Chart(title, hint)
    if counts:
        trace: dict[str, Any] = {
            "type": "heatmap",
            "x": column_labels(),
            "y": rows,
            "z": [[round(log10(n), 3) if n else None for n in row] for row in counts],
            "customdata": counts,
            "colorscale": "Viridis",
            "showscale": False,
            "hovertemplate": "ratio - 1 from %{x}, " + axis + " from %{y}: %{customdata} tokens<extra></extra>",
        }
        chart.traces.append(trace)
        # categories, because the steps of the axes are not equal
        chart.layout = {
            "xaxis": {"type": "category", "title": {"text": "ratio - 1", "standoff": 6}},
            "yaxis": {"type": "category", "title": {"text": axis}},
            "hovermode": "closest",
        }
    return chart


def _muted_tokens(record: Record, of: str) -> Chart:
    chart = Chart(
        "Tokens that lose their gradient",
        "The tokens that most often lose their gradient to clip, veto or mask, with counts." + of,
    )
    tokens = record.get("muted_tokens", {})
    bars = [(t, n) for t, n in zip(tokens.get("text", []), tokens.get("muted", []), strict=False) if n][:TOKENS]
    if bars:
        chart.traces.append(
            {
                "type": "bar",
                "x": list(range(len(bars))),
                "y": [n for _, n in bars],
                "customdata": [html.escape(repr(text)) for text, _ in bars],
                "marker": {"color": "#4c8bd6"},
                "hovertemplate": "%{customdata}: %{y}<extra></extra>",
            }
        )
        ticks = {"tickvals": list(range(len(bars))), "ticktext": [html.escape(repr(text)[1:-1]) for text, _ in bars]}
        chart.layout = {"xaxis": ticks | {"tickangle": -60}, "hovermode": "closest"}
    return chart
