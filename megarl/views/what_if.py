"""The table and the figure of ``megarl what-if``, from its records (one per policy, objective and batch)."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.estimates import mean_of_replicates
from megarl.storage.files import write_atomic
from megarl.views.report import page
from megarl.views.report.chart import Chart
from megarl.views.report.charts import COLOURS
from megarl.views.run_reader import muted_by

COLUMNS = ("kept", "clipped", "vetoed", "masked", "norm", "cosine", "cosine_to_grpo")
HEADS = ("kept", "clipped", "vetoed", "masked", "gradient norm", "cosine to fresh", "cosine to GRPO")
# columns of the terminal's table, which fits into 80 characters because shares have no intervals there
_WIDTHS = {"kept": 6, "clipped": 8, "vetoed": 7, "masked": 7, "norm": 12, "to fresh": 11, "to GRPO": 11}


def estimates(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One object per policy and objective.

    It has [mean, low, high] of each column, with 95 % intervals over batches; ``values`` has the numbers of the single
    batches. A column that an objective does not have is left out, and so is the cosine of a gradient that is 0 in every
    batch.
    """
    records = [record | _muted(record) for record in records]
    found: list[dict[str, Any]] = []
    for update, objective in dict.fromkeys((r["update"], r["objective"]) for r in records):
        mine = [r for r in records if (r["update"], r["objective"]) == (update, objective)]
        row: dict[str, Any] = {"update": update, "objective": objective, "batches": len(mine), "values": {}}
        for column in (*COLUMNS, "ess"):
            values = [r[column] for r in mine if r.get(column) is not None]
            if len(values) > 1:
                mean, bounds = mean_of_replicates(np.array(values))
                row[column] = [mean, *bounds]
                row["values"][column] = values
        found.append(row)
    return found


def _muted(record: dict[str, Any]) -> dict[str, float]:
    """The columns clipped, vetoed and masked of a record; what is neither clipped nor vetoed is masked."""
    fractions = record.get("fractions", {})
    words = {"clip": "clipped", "veto": "vetoed"}
    return {words.get(cause, "masked"): fractions[metric] for metric, cause in muted_by([fractions]).items()}


def table(rows: Sequence[dict[str, Any]], given: bool = False) -> str:
    """The rows as a table for a terminal. given: whether the fresh responses are those of --fresh-stage."""
    source = "the given fresh responses of the policy" if given else "new responses of the policy to the same prompts"
    lines = [
        f"means over {rows[0]['batches']} batches, ± 95 %: shares of tokens; norm of the gradient;",
        f"its cosine to GRPO's gradient on {source}",
        "(to fresh) and on the same batch (to GRPO). Row fresh: GRPO on one fresh batch,",
        "so its cosine to fresh shows the noise of sampling alone",
    ]
    for update in dict.fromkeys(row["update"] for row in rows):
        head = "".join(f"{name:>{width}}" for name, width in _WIDTHS.items())
        ess = next(_text(row["ess"]) for row in rows if row["update"] == update and "ess" in row)
        lines += ["", f"policy after {update} updates: effective sample size {ess}", f"{'':17}{head}"]
        lines += [f"{row['objective']:17}{_cells(row)}" for row in rows if row["update"] == update]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> str:
    shares = [f"{row[column][0]:.3f}" if column in row else "-" for column in COLUMNS[:4]]
    others = [_text(row.get("norm"), ".2g"), *(_text(row.get(column), ".2f") for column in COLUMNS[5:])]
    cells = [*shares, *(cell.replace(" ", "") for cell in others)]
    return "".join(f" {cell:>{width - 1}}" for cell, width in zip(cells, _WIDTHS.values(), strict=True))


def _text(estimate: list[float] | None, digits: str = ".3f") -> str:
    return f"{estimate[0]:{digits}} ± {estimate[2] - estimate[0]:{digits}}" if estimate else "-"


def write_figure(rows: Sequence[dict[str, Any]], name: str, output: Path) -> None:
    """Write a self-contained page with a table, and charts of the cosines, the norm and the tokens with a gradient."""
    kinds = (
        (
            "cosine",
            "Cosine to a fresh on-policy gradient",
            "Between each objective's gradient on stored batches and GRPO's on fresh responses of the policy; bars are "
            "95 % intervals over batches. Fresh is GRPO's gradient on one fresh batch: its distance from 1 is "
            "the noise of sampling.",
        ),
        ("cosine_to_grpo", "Cosine to GRPO on the same batch", "How far an objective turns GRPO's gradient."),
        ("norm", "Gradient norm", "Before clipping, of one batch."),
        ("kept", "Tokens with a gradient", "Share of the trained tokens that no clip, veto or mask takes out."),
    )
    charts = [_chart(rows, column, title, hint) for column, title, hint in kinds]
    write_atomic(output, page(html.escape(name), "", "", charts, f'<div class="scroll">{_html_table(rows)}</div>'))


def _chart(rows: Sequence[dict[str, Any]], column: str, title: str, hint: str) -> Chart:
    """One column of the table, with the objectives beside each other and a colour per policy."""
    chart = Chart(title, hint, layout={"scattermode": "group", "xaxis": {"tickangle": -45}, "hovermode": "closest"})
    for number, update in enumerate(dict.fromkeys(row["update"] for row in rows)):
        mine = [row for row in rows if row["update"] == update and column in row]
        chart.traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"staleness {update}",
                "x": [row["objective"] for row in mine],
                "y": [row[column][0] for row in mine],
                "marker": {"size": 7, "color": COLOURS[number % len(COLOURS)]},
                "error_y": {
                    "type": "data",
                    "array": [row[column][2] - row[column][0] for row in mine],
                    "thickness": 1.2,
                    "width": 2,
                },
                "hovertemplate": "%{x}: %{y:.3f}",
            }
        )
    return chart


def _html_table(rows: Sequence[dict[str, Any]]) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("Updates", "Objective", *HEADS))
    body = ""
    for row in rows:
        texts = [_text(row.get(column), ".3g" if column == "norm" else ".3f") for column in COLUMNS]
        cells = [row["objective"], *texts]
        body += f"<tr><th>{row['update']}</th>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
    return f'<table id="summary"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
