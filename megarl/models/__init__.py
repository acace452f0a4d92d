"""Model families: what megarl knows of each Hugging Face ``model_type``. Imports neither torch nor Megatron."""

from __future__ import annotations

from typing import Any

from megarl.models import llama, qwen2, qwen3, qwen3_moe
from megarl.models.family import Family

__all__ = ["FAMILIES", "Family", "family_of"]

FAMILIES: dict[str, Family] = {
    "qwen3_moe": qwen3_moe.FAMILY,
    "qwen3": qwen3.FAMILY,
    "qwen2": qwen2.FAMILY,
    "llama": llama.FAMILY,
}


def family_of(hf: dict[str, Any]) -> Family:
    """The family of a model whose settings `megarl.models.hf_config.read_hf_config` has read."""
    return FAMILIES[hf["model_type"]]
