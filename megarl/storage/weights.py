"""The weight files of a Hugging Face model directory, and one hash for all of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from megarl.errors import UserError

INDEX_FILE = "model.safetensors.index.json"


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that the index names, or all if there is no index (some models come in two formats).

    `UserError` if there are no such files, the index is damaged, or it names a file that does not exist.
    """
    index = Path(directory) / INDEX_FILE
    if not index.exists():
        files = sorted(Path(directory).glob("*.safetensors"))
        if not files:
            raise UserError(f"{directory} has no *.safetensors files; megarl reads no other format of weights")
        return files
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if foreign := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{foreign[0][:200]!a} is not the name of a file in the same directory")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} is damaged: {error}") from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise UserError(f"{index} names {missing[0]}, which does not exist; download the model again")
    return [index.parent / name for name in names]


def combine_hashes(hashes: dict[str, str]) -> str:
    """One hash for a set of weight files, from {file name: sha256}."""
    return hashlib.sha256("".join(f"{name} {hashes[name]}\n" for name in sorted(hashes)).encode()).hexdigest()
