"""The request that a command leaves in a scratch run directory for the phase that it starts, and the phase's answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.storage.files import write_atomic

_REQUEST, _ANSWER = "request.json", "answer.json"


def write_request(run: Path, **request: Any) -> None:
    """Store the request; called by the command before it starts the phase."""
    write_atomic(run / _REQUEST, json.dumps(request))


def read_request(run: Path) -> dict[str, Any]:
    """The request; called by the phase."""
    found: dict[str, Any] = json.loads((run / _REQUEST).read_text())
    return found


def write_answer(run: Path, records: list[dict[str, Any]]) -> None:
    """Store the answer; called by the phase at its end."""
    write_atomic(run / _ANSWER, json.dumps(records))


def read_answer(run: Path) -> list[dict[str, Any]]:
    """The answer; called by the command after the phase has ended."""
    found: list[dict[str, Any]] = json.loads((run / _ANSWER).read_text())
    return found
