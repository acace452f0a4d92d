"""One chart of the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Chart:
    """A Plotly chart with its heading."""

    title: str
    hint: str  # a sentence below the title: what the chart shows and what to look for
    traces: list[dict[str, Any]] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    empty: str = ""  # text shown if there is nothing to draw; "" leaves the chart out
