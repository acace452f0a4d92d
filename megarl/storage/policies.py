"""A policy directory: a Hugging Face model with ``megarl.json``, which has the policy's version and weights hash."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from megarl.data.tokenizer import TOKENIZER_FILES
from megarl.errors import UserError
from megarl.models.hf_config import quantisation, read_settings
from megarl.storage.checked_json import decode, encode
from megarl.storage.files import atomic_directory, file_sha256
from megarl.storage.reference_logprobs import REFERENCE_FILE
from megarl.storage.weights import INDEX_FILE, combine_hashes, weight_files

CONFIG_FILE, INFO_FILE = "config.json", "megarl.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


@dataclass(frozen=True)
class PolicyInfo:
    """Which policy of a run a directory holds."""

    version: int  # optimizer updates that these weights have had
    weights_hash: str  # sha256 over the names and contents of all weight files
    files: dict[str, str] = field(default_factory=dict)  # {name: sha256} of all other files


def write_info(policy_dir: Path, info: PolicyInfo) -> None:
    """Write ``megarl.json`` last, since it has the checksums of the files beside it. `atomic_directory` syncs it."""
    others = [path for path in sorted(policy_dir.iterdir()) if path.suffix != ".safetensors" and path.is_file()]
    info = replace(info, files={path.name: file_sha256(path) for path in others if path.name != INFO_FILE})
    (policy_dir / INFO_FILE).write_bytes(encode(asdict(info), indent=1))


def read_info(policy_dir: Path) -> PolicyInfo:
    """Version and hashes of a policy. A model that megarl did not write has version 0 and is hashed by this call.

    `UserError` if ``megarl.json`` is damaged.
    """
    path = policy_dir / INFO_FILE
    if not path.exists():
        return PolicyInfo(0, _hash_weights(policy_dir))
    try:
        info = PolicyInfo(**decode(path.read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if not isinstance(info.files, dict) or not all(Path(name).name == name for name in info.files):
        raise UserError(f"{path} is damaged: it does not name the files beside it")
    return info


def check_policy(policy_dir: Path, remedy: str) -> None:
    """`UserError`, ending with ``remedy``, unless all files of a run's policy match their checksums; reads them all."""
    try:
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
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}. {remedy}") from error
    except UserError as error:
        raise UserError(f"{error}. {remedy}") from error


def _hash_weights(policy_dir: Path) -> str:
    return combine_hashes({file.name: file_sha256(file) for file in weight_files(policy_dir)})


def copy_auxiliary(source: Path, target: Path) -> None:
    """Copy all files but the weights: configuration, tokenizer, chat template, licence."""
    for file in sorted(Path(source).iterdir()):
        weights = file.suffix in _WEIGHT_SUFFIXES or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name not in (INFO_FILE, REFERENCE_FILE):
            shutil.copyfile(file, target / file.name)


def copy_weights(model_dir: Path, target: Path) -> str:
    """Copy the weight files and their index, converting MXFP4 weights to bfloat16; returns the weights hash."""
    if is_mxfp4(model_dir):
        from megarl.storage.mxfp4 import write_bfloat16  # imports torch

        return combine_hashes(write_bfloat16(model_dir, target))
    hashes = {}
    for file in weight_files(model_dir):
        shutil.copyfile(file, target / file.name)
        hashes[file.name] = file_sha256(target / file.name)
    index = model_dir / INDEX_FILE
    if index.exists():
        shutil.copyfile(index, target / index.name)
    return combine_hashes(hashes)


def check_weights(model_dir: Path) -> None:
    """`UserError` unless all weight files are complete and have dtypes that megarl reads or converts.

    Reads only the headers, which also reveal quantised weights that config.json does not mention.
    """
    from megarl.storage.tensor_files import TensorFiles  # imports torch

    with TensorFiles.of_directory(model_dir) as files:
        packed = [name for name, region in files.regions.items() if not region.dtype.is_floating_point]
    if packed and not is_mxfp4(model_dir):
        raise UserError(
            f"{model_dir}: tensor {packed[0]!r} is quantised, but config.json has no quantization_config (mxfp4): take "
            "it from the published model"
        )


def is_mxfp4(model_dir: Path) -> bool:
    """Whether the model's weights are MXFP4 and must be converted; `read_hf_config` refuses other quantisations."""
    config = model_dir / CONFIG_FILE
    return config.exists() and quantisation(read_settings(config)) == "mxfp4"


def copy_policy(model_dir: Path, tokenizer_dir: Path, target: Path, version: int = 0) -> PolicyInfo:
    """Copy the base model to ``target``, the policy of the first stage, so that later changes to it do not matter.

    MXFP4 weights are converted to bfloat16, and config.json loses its ``quantization_config``.
    """
    with atomic_directory(target) as temporary:
        copy_auxiliary(model_dir, temporary)
        if tokenizer_dir != model_dir:
            for file in sorted(Path(tokenizer_dir).iterdir()):
                if file.is_file() and file.name.startswith(TOKENIZER_FILES):
                    shutil.copyfile(file, temporary / file.name)
        if is_mxfp4(model_dir):
            settings = read_settings(model_dir / CONFIG_FILE)
            del settings["quantization_config"]
            (temporary / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n")
        info = PolicyInfo(version, copy_weights(model_dir, temporary))
        write_info(temporary, info)
    return info


def dequantised_model(model_dir: Path, folder: Path) -> Path:
    """``model_dir`` itself, or for an MXFP4 model its bfloat16 copy in ``folder``, made at the first call."""
    if not is_mxfp4(model_dir):
        return model_dir
    converted = folder / hashlib.sha256(bytes(model_dir.resolve())).hexdigest()[:12]
    if not converted.exists():
        copy_policy(model_dir, model_dir, converted)
    return converted
