"""``reference.json``: text of the run and what the actor makes of it; engines must make the same of it.

It stands beside each policy that the actor exports, and in the directory of a stage for the policy that begins it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.errors import UserError
from megarl.storage.files import write_atomic

REFERENCE_FILE = "reference.json"
TEXT_SEQUENCES, TEXT_TOKENS = 32, 512  # an engine holds the logits of a whole sequence at a time


@dataclass(frozen=True)
class Reference:
    """Sequences, and what the actor makes of them with the policy beside which this stands."""

    sequences: list[list[int]]  # tokens, at least two
    logprobs: list[np.ndarray]  # [n - 1] float32 each, at temperature 1, of all tokens but the first
    precision: str  # "float32" | "bfloat16": the coarser of arithmetic and stored weights
    previous: list[np.ndarray] | None = None  # the same of the policy that was exported before; None: of a first one
    # what an engine with that previous policy stored of the last tokens of each sequence; None: not known
    stored: list[np.ndarray] | None = None


def cut_text(texts: Iterable[list[int]], longest: int) -> list[list[int]]:
    """Of the first texts so much that an engine with room for ``longest`` tokens scores them: it samples one more."""
    limit = min(TEXT_TOKENS, longest - 1)
    cut = (text[:limit] for text in texts)
    return [text for text, _ in zip((text for text in cut if len(text) > 1), range(TEXT_SEQUENCES), strict=False)]


_ARRAYS = ("logprobs", "previous", "stored")


def encode_reference(reference: Reference) -> dict[str, Any]:
    """As an object for JSON."""
    fields = asdict(reference)
    return fields | {name: fields[name] and [scores.tolist() for scores in fields[name]] for name in _ARRAYS}


def decode_reference(fields: dict[str, Any]) -> Reference:
    """The inverse of `encode_reference`."""
    arrays = {name: fields[name] and [np.array(scores, np.float32) for scores in fields[name]] for name in _ARRAYS}
    return Reference(**(fields | arrays))


def write_reference(directory: Path, reference: Reference) -> None:
    """Durable on return."""
    write_atomic(directory / REFERENCE_FILE, json.dumps(encode_reference(reference)) + "\n")


def read_reference(directory: Path) -> Reference | None:
    """None where there is none, as for a model that no actor exported; `UserError` for a damaged file."""
    path = directory / REFERENCE_FILE
    if not path.exists():
        return None
    try:
        return decode_reference(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
