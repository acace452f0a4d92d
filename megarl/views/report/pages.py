"""HTML pages of charts and tables.

A page loads nothing: it contains plotly.js, and a content security policy forbids the browser any request.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COLOURS = (
    "#4c8bd6",
    "#e0803a",
    "#3fa37a",
    "#b65fa8",
    "#c9a227",
    "#7d74d9",
    "#d1606a",
    "#4aa3b5",
)  # legible on white and on black


@dataclass
class Chart:
    """A Plotly chart of a page, with its heading; without traces it is left out."""

    title: str
    hint: str  # a sentence below the title: what the chart shows and what to look for
    traces: list[dict[str, Any]] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def line(number: int, x: list[Any], y: list[float]) -> dict[str, Any]:
    """A plotly line in the colour of run ``number``; a single point is drawn as a marker."""
    return {
        "type": "scatter",
        "mode": "lines" if len(x) > 1 else "markers",
        "x": x,
        "y": y,
        "legendgroup": str(number),
        "line": {"width": 1.8, "color": colour(number)},
        "hovertemplate": "%{y:.4~g}",
    }


def with_bars(
    number: int, x: list[Any], means: Sequence[float], bounds: Iterable[Sequence[float]], name: str = ""
) -> dict[str, Any]:
    """A line like `line`, through means with bars for their intervals [low, high]."""
    pairs = [(mean, low, high) for mean, (low, high) in zip(means, bounds, strict=True)]
    return line(number, x, list(means)) | {
        "mode": "lines+markers",
        "name": html.escape(name),
        "marker": {"size": 7, "color": colour(number)},
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [high - mean for mean, _, high in pairs],
            "arrayminus": [mean - low for mean, low, _ in pairs],
            "thickness": 1.5,
        },
        "customdata": [[low, high] for _, low, high in pairs],
        "hovertemplate": "%{y:.3f}  [%{customdata[0]:.3f}, %{customdata[1]:.3f}]",
    }


def table(name: str, head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table with the id ``name``; the first cell of each row is its heading. All texts are HTML."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        f"<tr><th>{first}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for first, *cells in rows
    )
    return f'<div class="table"><table id="{name}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def page(title: str, notes: str, summary: str, charts: list[Chart], below: str = "") -> str:
    """A self-contained page: notes, summary table, charts, and ``below`` at its end. All texts are HTML."""
    from plotly.offline import get_plotlyjs

    charts = [chart for chart in charts if chart.traces]
    figures = [{"data": chart.traces, "layout": chart.layout} for chart in charts]
    parts = {
        "title": title,
        "notes": notes,
        "summary": summary,
        "charts": "\n".join(_card(number, chart) for number, chart in enumerate(charts)),
        "below": below,
        # inside <script> only "</" and "<!--" could end the text, so < is written as an escape, which JSON allows
        "figures": json.dumps(figures, allow_nan=False).replace("<", "\\u003c"),
        # 2 MB instead of 5; the page decompresses it
        "plotly": base64.b64encode(gzip.compress(get_plotlyjs().encode(), 4, mtime=0)).decode(),
    }
    text = Path(__file__).with_name("page.html").read_text()
    pieces = text.split("@@")  # text, name, text, name, ..., text; inserted text is not searched for names again
    return "".join(parts[piece] if number % 2 else piece for number, piece in enumerate(pieces))


def _card(number: int, chart: Chart) -> str:
    title, hint = html.escape(chart.title), html.escape(chart.hint)
    return f'<section class="card"><h2>{title}</h2><div class="plot" id="chart-{number}"></div><p>{hint}</p></section>'
