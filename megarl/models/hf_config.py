"""Reads config.json of a Hugging Face model, unifies its settings, and refuses models that megarl does not support."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.foreign import parse_json, read_file
from megarl.models import FAMILIES, Family

_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_hf_config(model_dir: Path) -> dict[str, Any]:
    """The settings of a supported model; where families or versions of transformers differ, under one common name.

    Besides those in the file: ``rope_theta``; ``rope_scaling_factor`` (Llama 3's, or None); ``rope_yarn`` (YaRN's
    settings, or None); ``rotary_fraction``, the rotated share of a head; ``num_experts`` (None in a dense model);
    ``head_dim``; ``sparse_layers``, the layers with experts, from 0; ``divided`` and ``context_divided``, {setting: its
    value} for those that tensor parallelism, and tensor times context parallelism, must divide; and
    ``undivided_experts``, whether no expert may be divided between ranks.
    `UserError` for an unreadable file, an unknown family, an unsupported setting, or a missing one.
    """
    path = Path(model_dir) / "config.json"
    hf = read_settings(path)
    if (kind := str(hf.get("model_type"))) not in FAMILIES:
        raise UserError(f"{path}: model_type {kind[:60]!r} is not supported; known are {', '.join(FAMILIES)}")
    family = FAMILIES[hf["model_type"]]
    hf = language_settings(hf)
    if config := hf.get("quantization_config"):
        method = config.get("quant_method") if isinstance(config, dict) else config
        raise UserError(
            f"{path} has a quantization_config ({method}), but megarl trains weights that are not quantised: convert "
            "them to bfloat16 first (docs/scale.md has the lines for MXFP4), and remove quantization_config"
        )
    hf = family.uniform(hf)
    try:
        hf["num_experts"] = hf.get("num_experts") or hf.get("num_local_experts")
        hf["num_key_value_heads"] = hf.get("num_key_value_heads") or hf["num_attention_heads"]
        hf["head_dim"] = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        hf |= _rope(hf, family, path)
        for problem in family.problems(hf):
            raise UserError(f"{path}: {problem}")
        hf["divided"] = family.divided(hf)
        hf["context_divided"] = family.context_divided(hf)
        hf["undivided_experts"] = family.feed_forward.undivided
        hf["sparse_layers"] = [n for n in range(hf["num_hidden_layers"]) if family.has_experts(hf, n)]
        family.megatron_settings(hf)  # only to raise KeyError here for settings that only building the model reads
        for name in ("vocab_size", "max_position_embeddings"):
            if hf.get(name) is None:
                raise KeyError(name)
    except KeyError as error:
        raise UserError(f"{path} lacks the setting {error}, which a {hf['model_type']} needs") from error
    except TypeError as error:
        null = ", ".join(name for name, value in hf.items() if value is None)
        raise UserError(
            f"{path}: a setting has the wrong type: {error}; settings that are null: {null or 'none'}"
        ) from error
    return hf


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of a config.json, unchanged; `UserError` if the file cannot be read."""
    try:
        hf = parse_json(read_file(path))
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; [model] path must be a Hugging Face model directory"
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(hf, dict):
        raise UserError(f"{path} must hold a JSON object, but holds a {type(hf).__name__}")
    return hf


def language_settings(hf: dict[str, Any]) -> dict[str, Any]:
    """The settings of a config.json; those of the language model at the top level, also if the family nests them."""
    family = FAMILIES.get(str(hf.get("model_type")))
    inside = hf.get(family.nested) if family is not None and family.nested is not None else None
    return hf | inside | {"model_type": hf["model_type"]} if isinstance(inside, dict) else hf


def _rope(hf: dict[str, Any], family: Family, path: Path) -> dict[str, Any]:
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))  # "type" is the older name, as in Qwen2.5's YaRN
    known = family.attention.rope_types
    if kind not in known:
        raise UserError(f"{path}: rope_type {kind!r} is not supported; known are {', '.join(known)}")
    share = hf["rotary_dim"] / hf["head_dim"] if hf.get("rotary_dim") else 1.0  # as older config.json files have it
    fraction = float(rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", share)))
    if not 0 < fraction <= 1:
        raise UserError(f"{path}: the rotary embedding rotates {fraction:g} of a head; expected a share up to 1")
    if fraction != 1.0 and not family.attention.partial_rotary:
        raise UserError(f"{path}: partial_rotary_factor = {fraction} is not supported for {hf['model_type']}")
    if kind == "llama3":
        for name, only in _LLAMA3_ROPE.items():
            if rope.get(name, only) != only:
                raise UserError(f"{path}: rope {name} = {rope[name]!r} is not supported, only {only!r}")
    if kind == "yarn":
        _check_yarn(rope, path)
    return {
        "rope_theta": float(rope.get("rope_theta", hf.get("rope_theta", 10000.0))),
        "rope_scaling_factor": float(rope["factor"]) if kind == "llama3" else None,
        "rope_yarn": rope if kind == "yarn" else None,
        "rotary_fraction": fraction,
    }


def _check_yarn(rope: dict[str, Any], path: Path) -> None:
    """`UserError` for settings of YaRN (Peng et al. 2023, arXiv 2309.00071) that Megatron-Core does not support."""
    for name in ("factor", "original_max_position_embeddings"):
        if not rope.get(name):
            raise UserError(f"{path}: rope_type 'yarn' needs {name}")
    if rope.get("attention_factor") is not None:
        raise UserError(f"{path}: rope attention_factor = {rope['attention_factor']!r} is not supported, only None")
