"""The weight files of a Hugging Face model directory, and one hash for all of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from megarl.errors import UserError

INDEX_FILE = "model.safetensors.index.json"


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that the index names, or all where there is none (some models come in two formats).

    `UserError` for a directory without such files, a damaged index, and one that names a file that is not there.
    """
    index = Path(directory) / INDEX_FILE
    if not index.exists():
        files = sorted(Path(directory).glob("*.safetensors"))
        if not files:
            raise UserError(f"{directory} holds no *.safetensors files; megarl reads safetensors only")
        return files
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if foreign := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{foreign[0][:200]!a} is no name of a file beside it")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{index} is damaged: {error}") from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise UserError(f"{index} names {missing[0]}, which is not there; download the model again")
    return [index.parent / name for name in names]


def combine_hashes(hashes: dict[str, str]) -> str:
    """One hash for a set of weight files, from {file name: sha256}."""
    return hashlib.sha256("".join(f"{name} {hashes[name]}\n" for name in sorted(hashes)).encode()).hexdigest()
