"""Exports adapters alone in PEFT's format, in which vLLM serves them together with the base model.

Names and layout are those of PEFT 0.21 and of vLLM 0.32 (`vllm.lora.lora_model`): a module that the base model calls
NAME has ``base_model.model.NAME.lora_A.weight`` [rank, inputs] and ``.lora_B.weight`` [outputs, rank], scaled by
``lora_alpha / r``. Matrices that Megatron fuses have one adapter, so each of their modules (query, key and value; gate
and up) gets the same A and its own rows of B. Each expert's matrix is a module.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from megarl.actor.hf_names import hf_tensors, name_on_this_rank
from megarl.actor.model import PolicyModel
from megarl.recipe.actor_table import LoraTable
from megarl.storage.checked_json import write_checked
from megarl.storage.files import atomic_directory
from megarl.storage.policies import INFO_FILE

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def export_adapters(
    models: list[PolicyModel], target: Path, table: LoraTable, base: Path, base_hash: str | None, version: int
) -> None:
    """Write the adapters to the directory ``target``. The model must be in one process, without parallelism.

    base: path of the base model, recorded in adapter_config.json. base_hash: hash of its weights, and version: number
    of updates that the adapters have had; both are recorded in ``megarl.json``.
    """
    tensors = dict(_tensors(models))
    modules = {name.rsplit(".", 3)[-3] for name in tensors}  # ..q_proj.lora_A.weight
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": table.rank,
        "lora_alpha": table.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with atomic_directory(target) as temporary:
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        (temporary / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        write_checked(temporary / INFO_FILE, {"version": version, "base_weights_hash": base_hash})


def _tensors(models: list[PolicyModel]) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor in hf_tensors(models):
        if (added := tensor.low_rank) is not None:
            module = f"base_model.model.{name_on_this_rank(tensor, models[0]).removesuffix('.weight')}"
            yield f"{module}.lora_A.weight", added.a.clone()
            yield f"{module}.lora_B.weight", torch.cat(added.ups)
