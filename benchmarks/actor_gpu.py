"""An update of the actor on a GPU: tokens per second, share of the GPU's arithmetic, memory, by layers and kernels.

The models are two layers of Qwen3-30B-A3B, with its 128 experts and its lm head, and four layers of Qwen3-8B: as much
as fits on one GPU with gradients, master weights and Adam's moments. Weights and responses are random. The share of the
arithmetic is relative to a product of large matrices in the same run, and recomputation does not count as work. Without
a GPU every figure is "not measured".

    python benchmarks/actor_gpu.py
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import NOT_MEASURED, ROOT, write_table
from linear_logprob import matmul_ceiling

from megarl.actor import parallel
from megarl.distributed import become_single_process
from megarl.kernels.library import find_library
from megarl.models.hf_config import read_hf_config
from megarl.objectives import build_objective
from megarl.planner.sizes import active_parameters, forward_flops
from megarl.recipe.load import parse_recipe
from megarl.recipe.tables import Recipe

UPDATES, WARM_UP = 5, 2
COLUMNS = ("seconds an update", "tokens a second", "TFLOP/s", "share of a product's", "peak GiB")


def cut(example: str, **changes: int) -> dict[str, Any]:
    """The config.json of an example with fewer layers."""
    return json.loads((ROOT / "examples" / example / "config.json").read_text()) | changes


def tiny() -> dict[str, Any]:
    small = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    return cut("qwen3_30b_a3b", vocab_size=256, num_experts=8, moe_intermediate_size=32, **small)


# name: (config.json, responses per update, tokens of the longest response)
MODELS = {
    "Qwen3-30B-A3B, 2 layers": (cut("qwen3_30b_a3b", num_hidden_layers=2), 32, 4096),
    "Qwen3-8B, 4 layers": (cut("qwen3_8b", num_hidden_layers=4), 32, 4096),
}
TINY = {"tiny": (tiny(), 4, 32)}
WAYS = {
    "torch, triton": {"layers": "torch", "kernels": "triton"},
    "torch, cuda": {"layers": "torch", "kernels": "cuda"},
    "torch, torch": {"layers": "torch", "kernels": "torch"},
    "torch, triton, recompute": {"layers": "torch", "kernels": "triton", "recompute": "full"},
    "transformer_engine, triton": {"layers": "transformer_engine", "kernels": "triton"},
}


def make_recipe(folder: Path, longest: int, actor: dict[str, Any]) -> Recipe:
    return parse_recipe(
        {
            "model": {"path": str(folder)},
            "data": {"source": "file", "train": "none.jsonl"},
            "reward": {"kind": "exact"},
            "actor": {"backend": "cuda", "tokens_per_micro_batch": 4 * longest} | actor,
        }
    )


def write_model(config: dict[str, Any], folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def make_samples(rng: np.random.Generator, vocabulary: int, responses: int, longest: int) -> list[Any]:
    from megarl.actor.packing import Sample

    def one() -> Any:
        length = int(rng.integers(longest // 4, longest * 7 // 8))
        prompt, response = (rng.integers(0, vocabulary, n).astype(np.int32) for n in (longest // 8, length))
        logprobs = rng.normal(-np.log(vocabulary), 0.3, length).clip(max=0).astype(np.float32)
        return Sample(prompt, response, logprobs, float(rng.normal()))

    return [one() for _ in range(responses)]


def measure(folder: Path, responses: int, longest: int, way: dict[str, Any], product: float) -> dict[str, Any]:
    """Medians over updates, which include the upload of their batches. product: FLOP/s of a matrix product."""
    from megarl.actor import packing, step

    recipe, hf = make_recipe(folder, longest, way), read_hf_config(folder)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    actor = step.Actor.build(recipe, folder, torch.device("cuda", torch.cuda.current_device()))
    objective = build_objective("mu_grpo", {})
    active = active_parameters(hf, sum(p.numel() for chunk in actor.models for p in chunk.parameters()))
    seconds, tokens, rates = [], [], []
    for update in range(WARM_UP + UPDATES):
        samples = make_samples(np.random.default_rng(update), hf["vocab_size"], responses, longest)
        torch.cuda.synchronize()
        start = time.perf_counter()
        batches = packing.micro_batches(samples, recipe.actor.tokens_per_micro_batch, actor.device)
        step.train_step(actor, batches, objective, lr=1e-6)
        torch.cuda.synchronize()
        if update >= WARM_UP:
            seconds.append(time.perf_counter() - start)
            tokens.append(sum(map(len, samples)) / seconds[-1])
            rates.append(3 * sum(forward_flops(hf, active, len(s)) for s in samples) / seconds[-1])
    rate = statistics.median(rates)
    values = (statistics.median(seconds), statistics.median(tokens), rate / 1e12, rate / product)
    return dict(zip(COLUMNS, (*values, torch.cuda.max_memory_allocated() / 2**30), strict=True))


def missing(way: dict[str, Any]) -> str:
    """Why a way cannot run here; "" if it can."""
    if way["layers"] == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        return "transformer_engine is not installed"
    return "the CUDA kernels are not installed" if way["kernels"] == "cuda" and not find_library("cuda") else ""


def rows(models: dict[str, tuple[dict[str, Any], int, int]], ways: list[str], side: int = 8192) -> list[dict[str, Any]]:
    """A row per model and way. side: of the square matrices whose product measures the GPU's arithmetic."""
    found = torch.cuda.is_available()
    if found:
        product = matmul_ceiling(side)
        become_single_process()
        parallel.initialize(make_recipe(ROOT, 1, {}))
    table = []
    for name, (config, responses, longest) in models.items():
        with tempfile.TemporaryDirectory() as folder:
            if found:
                write_model(config, Path(folder))
            for title in ways:
                way = WAYS[title]
                row = {"model": name, "layers, kernels": title} | dict.fromkeys(COLUMNS, NOT_MEASURED)
                row["note"] = missing(way) if found else "no GPU"
                if not row["note"]:
                    try:
                        row |= measure(Path(folder), responses, longest, way, product)
                    except Exception as error:  # the other rows are measured nevertheless
                        row["note"] = f"{type(error).__name__}: {error}".partition("\n")[0]
                table.append(row)
    return table


if __name__ == "__main__":
    write_table("actor_gpu", rows(MODELS, list(WAYS)))
