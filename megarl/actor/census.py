"""Parameters on each rank of a layout, counted on the real Megatron model without memory or processes for it.

The model is built on torch's meta device under its fake process group. That replaces what Megatron-Core sees of torch
in the whole process, so `megarl.views.plan` runs this module as a process of its own: each line on stdin is a question,
``{"hf": settings of the model, "recipe": TOML, "ranks": n}``, and each line on stdout its answer.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist

from megarl.actor import cpu_backend
from megarl.recipe.load import override_recipe, parse_recipe
from megarl.recipe.tables import Recipe


def census(hf: dict[str, Any], recipe: Recipe, ranks: int) -> list[dict[str, int]]:
    """For each pipeline stage: layers, and on the fullest of its ranks parameters of experts and all others."""
    recipe = override_recipe(
        recipe, ["megatron.init_model_with_meta_device=true", "megatron.perform_initialization=false"]
    )
    per_stage = ranks // recipe.actor.pipeline_parallel
    return [_count(hf, recipe, ranks, stage * per_stage) for stage in range(recipe.actor.pipeline_parallel)]


def _count(hf: dict[str, Any], recipe: Recipe, ranks: int, rank: int) -> dict[str, int]:
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megarl.actor.model import build_model

    actor = recipe.actor
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=actor.tensor_parallel,
            pipeline_model_parallel_size=actor.pipeline_parallel,
            virtual_pipeline_model_parallel_size=recipe.megatron.get("virtual_pipeline_model_parallel_size"),
            context_parallel_size=actor.context_parallel,
            expert_model_parallel_size=actor.expert_parallel,
            expert_tensor_parallel_size=actor.expert_tensor_parallel or actor.tensor_parallel,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(recipe.run.seed)
        with torch.device("meta"):
            models = build_model(hf, recipe)
        named = [item for model in models for item in model.named_parameters()]
        experts = sum(parameter.numel() for name, parameter in named if ".experts." in name)
        return {
            "layers": sum(len(model.decoder.layers) for model in models),
            "expert": experts,
            "dense": sum(parameter.numel() for _, parameter in named) - experts,
        }
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def main() -> None:
    import tomllib

    warnings.filterwarnings("ignore")
    cpu_backend.install(torch.device("meta"))
    for line in sys.stdin:
        question = json.loads(line)
        recipe = parse_recipe(tomllib.loads(question["recipe"]))
        with contextlib.redirect_stdout(sys.stderr):  # whatever Megatron prints is no answer
            answer = census(question["hf"], recipe, question["ranks"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
