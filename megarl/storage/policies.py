"""A policy directory: Hugging Face safetensors, tokenizer, ``megarl.json`` with the policy's version and hash, and
``reference.json``: what the actor that exported it makes of a few fixed sequences."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.errors import UserError
from megarl.storage.files import atomic_directory

INFO_FILE = "megarl.json"
REFERENCE_FILE = "reference.json"
INDEX_FILE = "model.safetensors.index.json"


REFERENCE_SEQUENCES, REFERENCE_TOKENS = 4, 48


@dataclass(frozen=True)
class PolicyInfo:
    version: int  # optimizer updates behind these weights
    weights_hash: str  # sha256 over the names and contents of all weight files


@dataclass(frozen=True)
class Reference:
    """Log-probs by which an engine is known to have loaded the weights."""

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
    """For JSON."""
    return asdict(reference) | {"logprobs": [scores.tolist() for scores in reference.logprobs]}


def decode_reference(fields: dict[str, Any]) -> Reference:
    logprobs = [np.array(scores, np.float32) for scores in fields["logprobs"]]
    return Reference(fields["sequences"], logprobs, fields["precision"])


def write_reference(policy_dir: Path, reference: Reference) -> None:
    (policy_dir / REFERENCE_FILE).write_text(json.dumps(encode_reference(reference)) + "\n")


def read_reference(policy_dir: Path) -> Reference | None:
    """None for a policy that no actor exported."""
    path = policy_dir / REFERENCE_FILE
    if not path.exists():
        return None
    try:
        return decode_reference(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def combine_hashes(hashes: dict[str, str]) -> str:
    """One hash for a set of weight files, from {file name: sha256}."""
    return hashlib.sha256("".join(f"{name} {hashes[name]}\n" for name in sorted(hashes)).encode()).hexdigest()


def weight_files(policy_dir: Path) -> list[Path]:
    """The safetensors files that its index names, or all where it has none (some models come in two formats)."""
    index = Path(policy_dir) / INDEX_FILE
    if not index.exists():
        files = sorted(Path(policy_dir).glob("*.safetensors"))
        if not files:
            raise UserError(f"{policy_dir} holds no *.safetensors files; megarl reads safetensors only")
        return files
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is damaged: {error}") from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise UserError(f"{index} names {missing[0]}, which is not there; download the model again")
    return [index.parent / name for name in names]


def write_info(policy_dir: Path, info: PolicyInfo) -> None:
    (policy_dir / INFO_FILE).write_text(json.dumps(asdict(info), indent=1) + "\n")


def read_info(policy_dir: Path) -> PolicyInfo:
    """Version and hash of a policy; a model that megarl did not write has version 0."""
    path = policy_dir / INFO_FILE
    if not path.exists():
        return PolicyInfo(0, combine_hashes({file.name: file_sha256(file) for file in weight_files(policy_dir)}))
    try:
        return PolicyInfo(**json.loads(path.read_text()))
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise UserError(f"{path} is damaged: {error}") from error


def copy_auxiliary(source: Path, target: Path) -> None:
    """Copy everything that is no weight file: configuration, tokenizer, chat template, licence."""
    for file in sorted(Path(source).iterdir()):
        weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name not in (INFO_FILE, REFERENCE_FILE):
            shutil.copyfile(file, target / file.name)


def copy_policy(model_dir: Path, tokenizer_dir: Path, target: Path, version: int = 0) -> PolicyInfo:
    """Make ``target`` the policy of a first stage: a copy of the base model, so that a run never changes under it."""
    with atomic_directory(target) as temporary:
        copy_auxiliary(model_dir, temporary)
        if tokenizer_dir != model_dir:
            for file in sorted(Path(tokenizer_dir).iterdir()):
                if file.is_file() and file.name.startswith(
                    ("tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_template")
                ):
                    shutil.copyfile(file, temporary / file.name)
        hashes = {}
        for file in weight_files(model_dir):
            shutil.copyfile(file, temporary / file.name)
            hashes[file.name] = file_sha256(temporary / file.name)
        index = model_dir / INDEX_FILE
        if index.exists():
            shutil.copyfile(index, temporary / index.name)
        info = PolicyInfo(version, combine_hashes(hashes))
        write_info(temporary, info)
    return info
