"""What a command asks of a phase in a scratch run directory, and what that answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.storage.files import write_atomic

_REQUEST, _ANSWER = "request.json", "answer.json"


def write_request(run: Path, **request: Any) -> None:
    """Before the phase starts."""
    write_atomic(run / _REQUEST, json.dumps(request))


def read_request(run: Path) -> dict[str, Any]:
    """In the phase."""
    found: dict[str, Any] = json.loads((run / _REQUEST).read_text())
    return found


def write_answer(run: Path, records: list[dict[str, Any]]) -> None:
    """At the end of the phase."""
    write_atomic(run / _ANSWER, json.dumps(records))


def read_answer(run: Path) -> list[dict[str, Any]]:
    """After it."""
    found: list[dict[str, Any]] = json.loads((run / _ANSWER).read_text())
    return found
