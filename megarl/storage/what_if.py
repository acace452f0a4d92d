"""What ``megarl what-if`` and its phase tell each other, in a scratch run directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.storage.files import write_atomic


def write_request(run: Path, updates: Sequence[int], batches: Sequence[int]) -> None:
    """Which policies of the stage, by their updates in it, and which of its batches."""
    write_atomic(run / "what_if.json", json.dumps({"updates": list(updates), "batches": list(batches)}))


def read_request(run: Path) -> tuple[list[int], list[int]]:
    """(updates, batches)."""
    request = json.loads((run / "what_if.json").read_text())
    return request["updates"], request["batches"]


def write_records(run: Path, records: Sequence[dict[str, Any]]) -> None:
    """One record a policy, batch and objective."""
    write_atomic(run / "what_if_records.json", json.dumps(records))


def read_records(run: Path) -> list[dict[str, Any]]:
    """What `write_records` wrote."""
    found: list[dict[str, Any]] = json.loads((run / "what_if_records.json").read_text())
    return found
