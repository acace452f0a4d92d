"""Draws the cosines that `megarl what-if --json` prints as SVG, for a document.

python -m tools.what_if_svg ROWS.json OUTPUT.svg
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from megarl.views.report.pages import Chart, page, with_bars
from tools.chart_svg import charts_svg


def cosines(rows: list[dict[str, Any]]) -> Chart:
    """The cosine of each objective to a fresh gradient, with a colour per policy."""
    rows = [row for row in rows if "cosine" in row]
    names = list(dict.fromkeys(row["objective"] for row in rows))
    xaxis = {"categoryarray": names, "range": [-0.5, len(names) - 0.5], "tickangle": -90, "tickfont": {"size": 9}}
    chart = Chart("Cosine to a fresh on-policy gradient", "", layout={"scattermode": "group", "xaxis": xaxis})
    for number, update in enumerate(dict.fromkeys(row["update"] for row in rows)):
        mine = [row for row in rows if row["update"] == update]
        means, *bounds = zip(*(row["cosine"] for row in mine), strict=True)
        # of few batches, Student's intervals are so wide that they would set the axis
        pairs = [(max(low, -1.0), min(high, 1.0)) for low, high in zip(*bounds, strict=True)]
        trace = with_bars(number, [row["objective"] for row in mine], means, pairs, f"update {update}")
        chart.traces.append(trace | {"mode": "markers"})
    return chart


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        path.write_text(page("what-if", "", "", [cosines(json.loads(Path(sys.argv[1]).read_text()))]))
        Path(sys.argv[2]).write_text(charts_svg(path, [0])[0])
