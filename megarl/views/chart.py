"""One chart of the report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Chart:
    """One chart of the page."""

    title: str
    hint: str  # a sentence: what to look for
    traces: list[dict[str, Any]] = field(default_factory=list)
    layout: dict[str, Any] = field(default_factory=dict)
    empty: str = ""  # shown when there is nothing to draw; "" leaves the chart out
