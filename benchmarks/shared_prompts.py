"""What an update gains when a micro-batch holds each prompt once: trained tokens a second, and memory of activations.

Both sides train the same samples with the same actor on one thread, and take turns, so that other load on the machine
slows both. `base` is the pretrained model of 135M parameters that examples/smollm2/make_base.py makes; `tiny` is a
Qwen3-MoE of 1.9M parameters, for long responses. Bytes are those of all tensors that autograd keeps for the backward
pass, parameters left out.

    python benchmarks/shared_prompts.py [--turns 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from actor_overhead import make_recipe
from common import ROOT, write_table

from megarl.actor import packing, parallel, step
from megarl.actor.packing import Sample
from megarl.distributed import become_single_process
from megarl.objectives import build_objective
from megarl.recipe.load import parse_recipe
from megarl.recipe.tables import Recipe

BASE = ROOT / "examples/smollm2/base"
CASES = (  # model, prompt tokens, response tokens, responses of a prompt, prompts of an update
    ("base", 50, 12, 8, 4),
    ("tiny", 50, 12, 8, 16),
    ("tiny", 200, 200, 8, 4),
    ("tiny", 100, 4000, 2, 1),
)
VOCABULARY = 4096  # of the random tokens


def recipe_of(model: str, folder: Path) -> Recipe:
    if model == "tiny":
        return make_recipe(folder, "small")
    tables = {"model": {"path": str(BASE)}, "data": {"source": "reasoning_gym", "train": "spell_backward"}}
    return parse_recipe(tables | {"reward": {"kind": "reasoning_gym"}, "actor": {"backend": "cpu"}})


def make_samples(rng: np.random.Generator, prompt: int, response: int, responses: int, prompts: int) -> list[Sample]:
    def one(tokens: np.ndarray) -> Sample:
        logprobs = rng.normal(-8.3, 0.3, response).astype(np.float32)
        return Sample(tokens, rng.integers(0, VOCABULARY, response), logprobs, float(rng.normal()))

    shared = [rng.integers(0, VOCABULARY, prompt) for _ in range(prompts)]
    return [one(tokens) for tokens in shared for _ in range(responses)]


def saved_bytes(actor: step.Actor, batches: list[packing.MicroBatch]) -> int:
    """The bytes that autograd keeps of the forward pass of all micro-batches."""
    parameters = {weight.untyped_storage().data_ptr() for model in actor.models for weight in model.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}  # kept, so that no address is used twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step.compute_gradients(actor, batches, build_objective("minpro", {}))
    return sum(storage.nbytes() for storage in storages.values())


def measure(case: tuple[str, int, int, int, int], turns: int) -> dict[str, Any]:
    model, *sizes = case
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(model, Path(folder))
        actor = step.Actor.build(recipe, recipe.model.path, torch.device("cpu"))
    samples = make_samples(np.random.default_rng(0), *sizes)
    budget = max(2048, sum(len(sample) for sample in samples[: sizes[2]]))  # a group fits into a micro-batch
    times: dict[bool, list[float]] = {False: [], True: []}
    tokens, kept = {}, {}
    for turn in range(turns + 1):
        for share, seconds in times.items():
            start = time.process_time()
            batches = packing.micro_batches(samples, budget, actor.device, share=share)
            step.train_step(actor, batches, build_objective("minpro", {}), lr=1e-6)
            if turn:  # the first one warms up
                seconds.append(time.process_time() - start)
    for share in times:
        batches = packing.micro_batches(samples, budget, actor.device, share=share)
        tokens[share] = sum(batch.tokens.numel() for batch in batches)
        kept[share] = saved_bytes(actor, batches)
    seconds = {share: statistics.median(values) for share, values in times.items()}
    speedup = statistics.median(whole / shared for whole, shared in zip(times[False], times[True], strict=True))
    return {
        "model": model,
        "prompt / response": f"{sizes[0]} / {sizes[1]}",
        "group": sizes[2],
        "tokens": tokens[True] / tokens[False],
        "CPU-s whole": seconds[False],
        "CPU-s shared": seconds[True],
        "trained tokens a second": speedup,
        "bytes kept": kept[True] / kept[False],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    become_single_process()
    with tempfile.TemporaryDirectory() as folder:
        parallel.initialize(make_recipe(Path(folder), "small"))
    write_table("shared_prompts", [measure(case, options.turns) for case in CASES])


if __name__ == "__main__":
    main()
