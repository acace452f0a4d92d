"""config.json of a Hugging Face model: read, made uniform, and refused where megarl would compute another model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.models import FAMILIES

_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def read_hf_config(model_dir: Path) -> dict[str, Any]:
    """The settings of a supported model, under one name each where versions of transformers differ.

    Beside what the file has: ``rope_theta``, ``rope_scaling_factor`` (of Llama 3, or None), ``num_experts`` (None in a
    dense model) and ``head_dim``. `UserError` for an unreadable file, an unknown family and what a family refuses.
    """
    path = Path(model_dir) / "config.json"
    try:
        hf = json.loads(path.read_text())
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; [model] path must be a Hugging Face model directory"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(hf, dict):
        raise UserError(f"{path} holds no object, but {type(hf).__name__}")
    if hf.get("model_type") not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(f"{path}: model_type {hf.get('model_type')!r} is not supported; known are {known}")
    for problem in FAMILIES[hf["model_type"]].problems(hf):
        raise UserError(f"{path}: {problem}")
    hf["rope_theta"], hf["rope_scaling_factor"] = _rope(hf, path)
    hf["num_experts"] = hf.get("num_experts") or hf.get("num_local_experts")
    hf["head_dim"] = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    return hf


def _rope(hf: dict[str, Any], path: Path) -> tuple[float, float | None]:
    """(base, scaling factor of Llama 3 or None)."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", hf.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))  # the older name, as Qwen2.5's YaRN is published
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"{path}: rope_type {kind!r} is not supported; known are default, llama3")
    for name, only in _LLAMA3_ROPE.items():
        if rope.get(name, only) != only:
            raise UserError(f"{path}: rope {name} = {rope[name]!r} is not supported, only {only!r}")
    return theta, float(rope["factor"])
