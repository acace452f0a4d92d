"""Memory and time of `megarl plan`, compared with updates that were measured on an H100 and an H200.

`benchmarks/actor_gpu.py` measured them: two layers of Qwen3-30B-A3B, 32 responses of up to 4096 tokens in micro-batches
of 16384; docs/gpu.md has the table.
"""

import csv

from megarl.models.hf_config import read_hf_config
from megarl.planner.assumptions import GIB, WITHIN, Assumptions
from megarl.planner.parameter_counts import StageParameters
from megarl.planner.plan import Plan
from megarl.recipe.layout import Layout
from tests.actor.conftest import make_recipe
from tests.helpers import ROOT

MODEL = "Qwen3-30B-A3B, 2 layers"
MOST = 1.15  # planned over measured memory
CARDS = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}


def measured():
    for gpu, name in CARDS.items():
        with (ROOT / f"benchmarks/results/{gpu}/actor.csv").open() as file:
            for row in csv.DictReader(file):
                assert row["gpu"] == name
                if row["model"] == MODEL:
                    yield gpu, row["layers, kernels"], float(row["peak GiB"]), float(row["seconds an update"])


def plan(gpu, way):
    """The plan of the benchmark's update; its responses have 9 / 16 of 4096 tokens on average, its prompts 512."""
    layers, _, rest = way.partition(", ")
    actor = {"layers": layers, "kernels": rest.partition(", ")[0], "tokens_per_micro_batch": 16384}
    recipe = make_recipe(
        actor=actor | {"backend": "cuda", "recompute": "full" if rest.endswith("recompute") else "none"},
        data={"max_prompt_tokens": 512},
        rollout={"max_response_tokens": 4096 - 512, "responses_per_prompt": 1},
        schedule={"prompts_per_update": 32},
        objective={"name": "grpo", "advantage": "batch_normalised"},
    )
    hf = read_hf_config(ROOT / "examples/qwen3_30b_a3b") | {"num_hidden_layers": 2}
    of_layer = 2048 * (4096 + 2 * 512 + 4096 + 128 + 2) + 2 * 128
    counts = StageParameters(2, 2 * 151_936 * 2048 + 2 * of_layer + 2048, 2 * 128 * 3 * 2048 * 768)
    assume = Assumptions(mean_prompt=1.0, mean_response=9 / 14)
    return Plan(recipe, hf, 1, gpu, Layout(1), counts, [counts], assume)


def test_the_factors_of_the_documents_are_those_of_the_measurements():
    """A plan is never below its measurement.

    One card alone computes faster than the whole models of other systems, for which the range of hours is.
    """
    rows = [(plan(gpu, way), peak, seconds) for gpu, way, peak, seconds in measured()]
    # torch's peak does not have the context of CUDA
    items = [p.optimize for p, _, _ in rows]
    memory = [(sum(of.values()) - of["CUDA, NCCL and workspaces"]) / GIB for of in items]
    larger = [planned / peak for planned, (_, peak, _) in zip(memory, rows, strict=True)]
    slower = [p.update_seconds() / seconds for p, _, seconds in rows]
    text = (ROOT / "docs/scale.md").read_text().replace("\n", " ")
    assert min(larger) > 1 and max(larger) < MOST
    assert f"{min(larger):.2f} to {max(larger):.2f} times the peaks" in text
    assert f"{min(slower):.1f} to {max(slower):.1f} times the seconds" in text and min(slower) > 1 / WITHIN
