"""Bytes of weights, gradients and optimizer in `megarl plan`, compared with those that Megatron-Core allocates."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from megarl.models.hf_config import read_hf_config
from megarl.planner.plan import Plan
from megarl.recipe.load import dump_recipe, load_recipe
from tests.planner.simulated import EXAMPLES

MOE = "qwen3_30b_a3b/mu_grpo.toml"
NARROW = "megatron_ddp.grad_reduce_in_fp32=false"
CASES = {  # recipe, nodes of 8 GPUs, changes of the recipe
    "experts and data parallel": (MOE, 4, ["actor.tensor_parallel=4", "actor.expert_parallel=8"]),
    "pipeline, bf16 gradients": (
        *(MOE, 4),
        ["actor.tensor_parallel=2", "actor.pipeline_parallel=2", "actor.expert_parallel=4", NARROW],
    ),
    "adapters": ("qwen3_30b_a3b/mu_grpo-lora.toml", 1, []),
    "tied embeddings": ("qwen3_1_7b/mu_grpo.toml", 1, ["actor.pipeline_parallel=2"]),
    "latent attention, unequal stages": ("deepseek_v3/mu_grpo.toml", 32, []),
}


@pytest.fixture(scope="module")
def pool():
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        yield pool


def allocated(*question):
    from tests.planner import allocated  # Megatron, for the process of the pool alone

    return allocated.allocated(*question)


@pytest.mark.parametrize("name", CASES)
def test_planned_bytes_equal_those_that_megatron_allocates(pool, counter, name):
    """On the first and the last pipeline stage, within 0.1 % because Megatron pads its buffers.

    Activations are compared in `tests/rehearsal/on_device/test_memory.py`.
    """
    path, nodes, changes = CASES[name]
    recipe = load_recipe(EXAMPLES / path, ["actor.expert_tensor_parallel=1", *changes])
    folder, ranks = (EXAMPLES / path).parent, nodes * recipe.actor.processes_per_node
    plan = Plan.of(recipe, read_hf_config(folder), nodes, "h100", counter)
    for stage in sorted({0, len(plan.stages) - 1}):
        rank = ranks // len(plan.stages) * stage
        found = pool.submit(allocated, folder, dump_recipe(recipe), ranks, rank).result()
        items = plan.optimize_stage(stage)
        (gradients,) = (size for name, size in items.items() if name.startswith("gradients, "))
        said = {
            "weights": items["weights, bf16"],
            "gradients": gradients,
            "optimizer": items["optimizer, fp32 master and two moments"],
        }
        assert said == pytest.approx(found, rel=0.001)
