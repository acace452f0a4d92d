"""Counts the parameters on each rank of a layout by building Megatron's model, but without memory for weights.

The model is built on torch's meta device in a fake process group, in one process for all ranks. That patches Megatron
in the whole process, so `megarl.planner.parameter_counts` does it in a process of its own.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.actor import cpu_backend, parallel
from megarl.recipe.load import override_recipe
from megarl.recipe.tables import Recipe


def count_parameters(hf: dict[str, Any], recipe: Recipe, ranks: int) -> list[dict[str, Any]]:
    """Counts for each pipeline stage; parameters are those of one rank, as ranks of a stage have equally many.

    layers; expert, dense: parameters of experts, and all others; expert_adapters, dense_adapters: parameters of
    ``[actor.lora]``.
    """
    cpu_backend.install(torch.device("meta"))
    settings = (
        "actor.layers=torch",
        "actor.recompute=none",
        "megatron.init_model_with_meta_device=true",
        "megatron.perform_initialization=false",
    )
    recipe = override_recipe(recipe, settings)
    per_stage = ranks // recipe.actor.pipeline_parallel
    return [_count(hf, recipe, ranks, stage * per_stage) for stage in range(recipe.actor.pipeline_parallel)]


def _count(hf: dict[str, Any], recipe: Recipe, ranks: int, rank: int) -> dict[str, Any]:
    from megatron.core import parallel_state as mpu

    from megarl.actor import lora  # after `install` has replaced Megatron's torch
    from megarl.actor.model import build_model

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        parallel.build_groups(recipe, gloo=False)
        with torch.device("meta"):
            models = build_model(hf, recipe)
            lora.attach(models, recipe)
        sizes: Counter[tuple[bool, bool]] = Counter()
        for name, parameter in (named for model in models for named in model.named_parameters()):
            sizes[lora.is_adapters(name), ".experts." in name] += parameter.numel()
        return {
            "layers": sum(len(model.decoder.layers) for model in models),
            "expert": sizes[False, True],
            "dense": sizes[False, False],
            "expert_adapters": sizes[True, True],
            "dense_adapters": sizes[True, False],
        }
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
