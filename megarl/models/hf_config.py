"""config.json of a Hugging Face model: the families megarl knows, and a refusal of everything it would not compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megarl.errors import UserError

FAMILIES = ("qwen3_moe", "qwen3", "qwen2", "llama")
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# settings under which Megatron's model and the engine's would differ without a word
_ONLY = {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False}


def read_hf_config(model_dir: Path) -> dict[str, Any]:
    """The settings of a supported model, with the names that differ between transformers' versions made one."""
    path = Path(model_dir) / "config.json"
    try:
        hf: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise UserError(
            f"cannot read {path}: {error.strerror}; [model] path must be a Hugging Face model directory"
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if hf.get("model_type") not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UserError(f"{path}: model_type {hf.get('model_type')!r} is not supported; known are {known}")
    if hf["model_type"] == "qwen3_moe" and (hf.get("decoder_sparse_step", 1) != 1 or hf.get("mlp_only_layers")):
        raise UserError(f"{path}: models that mix dense and sparse layers are not supported")
    for name, only in _ONLY.items():
        if hf.get(name, only) != only:
            raise UserError(f"{path}: {name} = {hf[name]!r} is not supported, only {only!r}")
    if hf.get("attention_bias") and hf["model_type"] != "qwen2":
        raise UserError(f"{path}: attention_bias = true is not supported for {hf['model_type']}")
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
