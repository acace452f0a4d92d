"""Writes docs/papers.md, the table of what the papers say and where megarl has it, from docs/papers.toml.

    python tools/papers_table.py

`tests/docs/test_papers.py` fails where it is not up to date, or where a row names something that is not there.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
HEAD = """# What the papers say, and where megarl has it

This page is generated from [papers.toml](papers.toml) by `python tools/papers_table.py`. A test compares the two and
verifies that everything that a row names exists.

| word | meaning |
|---|---|
| exact | as the paper has it |
| deviates | different from the paper, with the difference or its reason |
| outside | a result that needs the paper's data and model weights; the row names the recipe for it |
| `key` or `metric` | a key of a recipe, or a metric of metrics.jsonl |
| row | a row of [examples/README.md](../examples/README.md) |
| chart | a chart of the report |
"""


def papers() -> list[dict[str, Any]]:
    """Each with ``name`` and ``rows``."""
    return tomllib.loads((DOCS / "papers.toml").read_text())["papers"]


def state(row: dict[str, Any]) -> str:
    """exact, deviates or outside."""
    return "deviates" if "why" in row else "outside" if "outside" in row else "exact"


def render(listed: list[dict[str, Any]]) -> str:
    """The page."""
    counts = Counter(state(row) for paper in listed for row in paper["rows"])
    text = f"{HEAD}\n{counts.total()} items: {counts['exact']} exact, {counts['deviates']} deviate, "
    text += f"{counts['outside']} outside.\n"
    for paper in listed:
        text += f"\n## {paper['name']}\n\n| item | where | exact or not |\n|---|---|---|\n"
        for row in paper["rows"]:
            said = {
                "exact": "exact",
                "deviates": f"deviates: {row.get('why')}",
                "outside": f"outside: {row.get('outside')}",
            }
            where = ", ".join(map(_place, row["where"]))
            text += f"| {row['item']} | {where} | {said[state(row)]} |\n"
    return text


def _place(where: str) -> str:
    kind, _, name = where.partition(":")
    if kind == "file":
        path, _, symbol = name.partition(":")
        return f"[{symbol or Path(path).name}](../{path})"
    return f'row "{name}"' if kind == "row" else f'chart "{name}"' if kind == "chart" else f"`{name}`"


if __name__ == "__main__":
    (DOCS / "papers.md").write_text(render(papers()))
