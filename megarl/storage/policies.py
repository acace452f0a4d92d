"""A policy directory: a Hugging Face model with two files of megarl's.

``megarl.json`` has the policy's version and weights hash. ``reference.json`` has text of the run with the actor's
log-probs of it, which every engine must reproduce; a stage's directory has one too, for the policy that begins it.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megarl.data.tokenizer import TEMPLATES, check_copied, files_of, is_of_tokenizer
from megarl.errors import UserError
from megarl.foreign import parse_json, read_file
from megarl.storage.checked_json import encode, read_checked
from megarl.storage.files import atomic_directory, file_sha256, write_atomic

CONFIG_FILE, INFO_FILE, INDEX_FILE = "config.json", "megarl.json", "model.safetensors.index.json"
REFERENCE_FILE = "reference.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
TEXT_SEQUENCES, TEXT_TOKENS = 32, 512  # few, because an engine holds the logits of a whole sequence in memory


@dataclass(frozen=True)
class PolicyInfo:
    """Which policy of a run a directory holds."""

    version: int  # optimizer updates that these weights have had
    weights_hash: str  # sha256 over the names and contents of all weight files
    files: dict[str, str] = field(default_factory=dict)  # {name: sha256} of all other files


def write_info(policy_dir: Path, info: PolicyInfo) -> None:
    """Write ``megarl.json`` last, since it has the checksums of the files beside it. `atomic_directory` syncs it."""
    others = [name for name in files_of(policy_dir) if not name.endswith(".safetensors") and name != INFO_FILE]
    info = replace(info, files={name: file_sha256(policy_dir / name) for name in others})
    (policy_dir / INFO_FILE).write_bytes(encode(asdict(info), indent=1))


def read_info(policy_dir: Path) -> PolicyInfo:
    """Version and hashes of a policy. A model that megarl did not write has version 0 and is hashed by this call.

    `UserError` if ``megarl.json`` is damaged.
    """
    path = policy_dir / INFO_FILE
    if not path.exists():
        return PolicyInfo(0, _hash_weights(policy_dir))
    info = PolicyInfo(**read_checked(path))
    if not isinstance(info.files, dict) or not all(
        Path(name).name == name.removeprefix(f"{TEMPLATES}/") for name in info.files
    ):
        raise UserError(f"{path} is damaged: it does not name the files beside it")
    return info


def check_policy(policy_dir: Path) -> None:
    """`UserError` or OSError unless all files of a run's policy match their checksums; reads them all."""
    if not (policy_dir / INFO_FILE).exists():
        raise UserError(f"{policy_dir / INFO_FILE} is gone")
    info = read_info(policy_dir)
    for name, expected in info.files.items():
        if (policy_dir / name).exists() and not (policy_dir / name).is_file():
            raise UserError(f"{policy_dir / name} is not a regular file")
        if file_sha256(policy_dir / name) != expected:
            raise UserError(f"{policy_dir / name} does not match its checksum in {INFO_FILE}")
    if _hash_weights(policy_dir) != info.weights_hash:
        raise UserError(f"the weights in {policy_dir} do not match their checksum in {INFO_FILE}")


def _hash_weights(policy_dir: Path) -> str:
    return combine_hashes({file.name: file_sha256(file) for file in weight_files(policy_dir)})


def copy_auxiliary(source: Path, target: Path) -> None:
    """Copy all files but the weights: configuration, tokenizer, chat templates, licence."""
    unwanted = (*_WEIGHT_SUFFIXES, ".index.json")
    names = [name for name in files_of(source) if not name.endswith(unwanted)]
    _copy(source, target, [name for name in names if name not in (INFO_FILE, REFERENCE_FILE)])


def _copy(source: Path, target: Path, names: Iterable[str]) -> None:
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, target / name)


def copy_weights(model_dir: Path, target: Path) -> str:
    """Copy the weight files and their index; returns the weights hash."""
    index, hashes = model_dir / INDEX_FILE, {}
    for file in weight_files(model_dir):
        shutil.copyfile(file, target / file.name)
        hashes[file.name] = file_sha256(target / file.name)
    if index.exists():
        shutil.copyfile(index, target / index.name)
    return combine_hashes(hashes)


def check_weight_files(model_dir: Path) -> None:
    """`UserError` unless all weight files are complete and have dtypes that megarl reads.

    Reads only the headers, which also reveal quantised weights that config.json does not mention.
    """
    from megarl.storage.tensor_files import TensorFiles  # imports torch

    with TensorFiles(weight_files(model_dir)):
        pass


def copy_policy(model_dir: Path, tokenizer_dir: Path, target: Path, version: int = 0) -> PolicyInfo:
    """Copy the base model to ``target``, the policy of the first stage, so that later changes to it do not matter."""
    with atomic_directory(target) as temporary:
        copy_auxiliary(model_dir, temporary)
        if tokenizer_dir != model_dir:
            # none of the model's own tokenizer may stay: its chat template would win over that of the other
            for name in filter(is_of_tokenizer, files_of(temporary)):
                (temporary / name).unlink()
            _copy(tokenizer_dir, temporary, filter(is_of_tokenizer, files_of(tokenizer_dir)))
            check_copied(tokenizer_dir, temporary)
        info = PolicyInfo(version, copy_weights(model_dir, temporary))
        write_info(temporary, info)
    return info


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
        names = sorted(set(parse_json(read_file(index))["weight_map"].values()))
        if foreign := [name for name in names if Path(name).name != name]:
            raise ValueError(f"{foreign[0][:200]!a} is not the name of a file in the same directory")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is damaged: {error}") from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise UserError(f"{index} names {missing[0]}, which does not exist; download the model again")
    return [index.parent / name for name in names]


def combine_hashes(hashes: dict[str, str]) -> str:
    """One hash for a set of weight files, from {file name: sha256}."""
    return hashlib.sha256("".join(f"{name} {hashes[name]}\n" for name in sorted(hashes)).encode()).hexdigest()


@dataclass(frozen=True)
class Reference:
    """Sequences of n tokens each (n >= 2), and the actor's log-probs of their tokens under one policy."""

    sequences: list[list[int]]
    logprobs: list[np.ndarray]  # [n - 1] float32 each, at temperature 1, of all tokens but the first
    precision: str  # "float32" | "bfloat16": the coarser of arithmetic and stored weights
    previous: list[np.ndarray] | None = None  # like logprobs, under the policy exported before; None: there was none
    # the log-probs that an engine with that previous policy stored for the last tokens of each sequence; None: unknown
    stored: list[np.ndarray] | None = None
    experts: bool = False  # whether the model has experts, between which rounding may decide
    base: bool = False  # of a base model on prompts, computed by transformers and not by an actor


def cut_text(texts: Iterable[list[int]], longest: int) -> list[list[int]]:
    """The beginnings of the first `TEXT_SEQUENCES` texts, cut so that an engine can score them.

    longest: the most tokens that the engine takes in a sequence, one of which it needs for a token to sample.
    """
    limit = min(TEXT_TOKENS, longest - 1)
    cut = (text[:limit] for text in texts)
    return [text for text, _ in zip((text for text in cut if len(text) > 1), range(TEXT_SEQUENCES), strict=False)]


_ARRAYS = ("logprobs", "previous", "stored")


def encode_reference(reference: Reference) -> dict[str, Any]:
    """Convert to an object for JSON."""
    fields = asdict(reference)
    return fields | {name: fields[name] and [values.tolist() for values in fields[name]] for name in _ARRAYS}


def decode_reference(fields: dict[str, Any]) -> Reference:
    """The inverse of `encode_reference`."""
    arrays = {name: fields[name] and [np.array(values, np.float32) for values in fields[name]] for name in _ARRAYS}
    return Reference(**fields | arrays)


def write_reference(directory: Path, reference: Reference) -> None:
    """Write the reference file of a directory; it is durable on return."""
    write_atomic(directory / REFERENCE_FILE, encode(encode_reference(reference)))


def read_reference(directory: Path) -> Reference | None:
    """The reference of a directory; None if there is none, as for a base model. `UserError` if it is damaged."""
    path = directory / REFERENCE_FILE
    return decode_reference(read_checked(path)) if path.exists() else None
