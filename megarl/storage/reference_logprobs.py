"""``reference.json``: text of the run with the actor's log-probs of it, which every engine must reproduce.

There is one beside each policy that the actor exports, and one in a stage's directory for the policy that begins it.
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
TEXT_SEQUENCES, TEXT_TOKENS = 32, 512  # few, because an engine holds the logits of a whole sequence in memory


@dataclass(frozen=True)
class Reference:
    """Sequences of n tokens each (n >= 2), and the actor's log-probs of their tokens under one policy."""

    sequences: list[list[int]]
    logprobs: list[np.ndarray]  # [n - 1] float32 each, at temperature 1, of all tokens but the first
    precision: str  # "float32" | "bfloat16": the coarser of arithmetic and stored weights
    previous: list[np.ndarray] | None = None  # like logprobs, under the policy exported before; None: there was none
    # the log-probs that an engine with that previous policy stored for the last tokens of each sequence; None: unknown
    stored: list[np.ndarray] | None = None
    # [n - 1] bool each: True from the first token on whose experts depend on rounding; None: unknown, or no experts
    tied: list[np.ndarray] | None = None


def cut_text(texts: Iterable[list[int]], longest: int) -> list[list[int]]:
    """The beginnings of the first `TEXT_SEQUENCES` texts, cut so that an engine can score them.

    longest: the most tokens that the engine takes in a sequence, one of which it needs for a token to sample.
    """
    limit = min(TEXT_TOKENS, longest - 1)
    cut = (text[:limit] for text in texts)
    return [text for text, _ in zip((text for text in cut if len(text) > 1), range(TEXT_SEQUENCES), strict=False)]


_ARRAYS = {"logprobs": np.float32, "previous": np.float32, "stored": np.float32, "tied": np.bool_}


def encode_reference(reference: Reference) -> dict[str, Any]:
    """Convert to an object for JSON."""
    fields = asdict(reference)
    return fields | {name: fields[name] and [values.tolist() for values in fields[name]] for name in _ARRAYS}


def decode_reference(fields: dict[str, Any]) -> Reference:
    """The inverse of `encode_reference`."""
    fields = {"tied": None} | fields  # references of earlier versions do not have it
    arrays = {
        name: fields[name] and [np.array(values, dtype) for values in fields[name]] for name, dtype in _ARRAYS.items()
    }
    reference = Reference(**(fields | arrays))
    lengths = [(len(sequence) - 1,) for sequence in reference.sequences]
    for name in ("logprobs", "previous", "tied"):
        values = getattr(reference, name)
        if values is not None and [value.shape for value in values] != lengths:
            raise ValueError(f"{name} does not have a value for each token but the first of each sequence")
    return reference


def write_reference(directory: Path, reference: Reference) -> None:
    """Write the reference file of a directory; it is durable on return."""
    write_atomic(directory / REFERENCE_FILE, json.dumps(encode_reference(reference)) + "\n")


def read_reference(directory: Path) -> Reference | None:
    """The reference of a directory; None if there is none, as for a base model. `UserError` if it is damaged."""
    path = directory / REFERENCE_FILE
    if not path.exists():
        return None
    try:
        return decode_reference(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
