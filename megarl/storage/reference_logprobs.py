"""``reference.json`` of a policy: the exporting actor's log-probs of a few fixed sequences.

An engine that has loaded the weights must give the same log-probs, or it computes another model.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.errors import UserError

REFERENCE_FILE = "reference.json"
REFERENCE_SEQUENCES, REFERENCE_TOKENS = 4, 48


@dataclass(frozen=True)
class Reference:
    """Fixed sequences and what the exporting actor makes of them."""

    sequences: list[list[int]]  # tokens
    logprobs: list[np.ndarray]  # [n - 1] float32 each, at temperature 1, of all tokens but the first
    precision: str  # "float32" | "bfloat16": the coarser of arithmetic and stored weights


def reference_sequences(vocabulary: int, context: int) -> list[list[int]]:
    """Sequences of random tokens, the same for every policy of a model; ``context`` as in max_position_embeddings."""
    tokens = np.random.Generator(np.random.Philox(key=1)).integers(
        vocabulary, size=(REFERENCE_SEQUENCES, min(REFERENCE_TOKENS, context - 1))
    )
    sequences: list[list[int]] = tokens.tolist()
    return sequences


def encode_reference(reference: Reference) -> dict[str, Any]:
    """As an object for JSON."""
    return asdict(reference) | {"logprobs": [scores.tolist() for scores in reference.logprobs]}


def decode_reference(fields: dict[str, Any]) -> Reference:
    """The inverse of `encode_reference`."""
    logprobs = [np.array(scores, np.float32) for scores in fields["logprobs"]]
    return Reference(fields["sequences"], logprobs, fields["precision"])


def write_reference(policy_dir: Path, reference: Reference) -> None:
    """Not synced: `atomic_directory` does that for the whole policy."""
    (policy_dir / REFERENCE_FILE).write_text(json.dumps(encode_reference(reference)) + "\n")


def read_reference(policy_dir: Path) -> Reference | None:
    """None for a model that no actor exported; `UserError` for a damaged file."""
    path = policy_dir / REFERENCE_FILE
    if not path.exists():
        return None
    try:
        return decode_reference(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
