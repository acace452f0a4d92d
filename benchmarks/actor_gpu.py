"""An update of the actor on a GPU: tokens per second, share of the GPU's arithmetic, memory, by layers and kernels.

The models are two layers of Qwen3-30B-A3B, with its 128 experts and its lm head, and four layers of Qwen3-8B: as much
as fits on one GPU with gradients, master weights and Adam's moments. Weights and responses are random. The share of the
arithmetic is relative to a product of large matrices in the same run, and recomputation does not count as work. Without
a GPU every figure is "not measured".

    python benchmarks/actor_gpu.py [--operators]

With --operators: how long the kernels of one update take, by what they do, and how long the device waits.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import NOT_MEASURED, ROOT, device_events, in_own_process, write_table
from linear_logprob import matmul_ceiling

from megarl.actor import parallel
from megarl.distributed import become_single_process
from megarl.kernels.library import find_library
from megarl.models.hf_config import read_hf_config
from megarl.objectives import build_objective
from megarl.planner.parameter_counts import StageParameters
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


# name: (config.json, responses per update, tokens of the longest response, responses of a prompt)
MODELS = {
    "Qwen3-30B-A3B, 2 layers": (cut("qwen3_30b_a3b", num_hidden_layers=2), 32, 4096, 1),
    "Qwen3-30B-A3B, 2 layers, groups of 8": (cut("qwen3_30b_a3b", num_hidden_layers=2), 32, 4096, 8),
    "Qwen3-8B, 4 layers": (cut("qwen3_8b", num_hidden_layers=4), 32, 4096, 1),
}
TINY = {"tiny": (tiny(), 4, 32, 2)}
WAYS = {
    "torch, triton": {"layers": "torch", "kernels": "triton"},
    "torch, triton, a prompt for each response": {"layers": "torch", "kernels": "triton", "share": False},
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


def make_samples(rng: np.random.Generator, vocabulary: int, responses: int, longest: int, group: int) -> list[Any]:
    """Prompts have an eighth of the tokens of the longest response, those of several responses a half."""
    from megarl.actor.packing import Sample

    def tokens(number: int) -> np.ndarray:
        return rng.integers(0, vocabulary, number).astype(np.int32)

    def one(prompt: np.ndarray) -> Any:
        length = int(rng.integers(longest // 4, longest * 7 // 8))
        logprobs = rng.normal(-np.log(vocabulary), 0.3, length).clip(max=0).astype(np.float32)
        return Sample(prompt, tokens(length), logprobs, float(rng.normal()))

    prompts = [tokens(longest // (8 if group == 1 else 2)) for _ in range(responses // group)]
    return [one(prompt) for prompt in prompts for _ in range(group)]


class Update:
    """Updates of a new actor, each with other samples."""

    def __init__(self, folder: Path, size: tuple[int, int, int], way: dict[str, Any]) -> None:
        """size: see `MODELS`. way: of `WAYS`."""
        from megarl.actor import step

        longest, way = size[1], dict(way)
        self.size, self.share = size, way.pop("share", True)
        self.recipe, self.hf = make_recipe(folder, longest, way), read_hf_config(folder)
        self.objective = build_objective("mu_grpo", {})
        become_single_process()
        parallel.initialize(self.recipe)
        self.actor = step.Actor.build(self.recipe, folder, torch.device("cuda", torch.cuda.current_device()))

    def run(self, update: int) -> list[Any]:
        """Upload the samples of an update and make it; returns the samples."""
        from megarl.actor import packing, step

        samples = make_samples(np.random.default_rng(update), self.hf["vocab_size"], *self.size)
        torch.cuda.synchronize()
        budget, share = self.recipe.actor.tokens_per_micro_batch, self.share and self.actor.models[0].shares_prompts
        batches = packing.micro_batches(samples, budget, self.actor.device, share=share)
        step.train_step(self.actor, batches, self.objective, lr=1e-6)
        torch.cuda.synchronize()
        return samples


def measure(folder: Path, size: tuple[int, int, int], way: dict[str, Any], side: int) -> dict[str, Any]:
    """Medians over updates, which include the upload of their batches. side: see `rows`."""
    product, updates = matmul_ceiling(side), Update(folder, size, way)
    sizes = Counter[bool]()
    for name, parameter in (named for chunk in updates.actor.models for named in chunk.named_parameters()):
        sizes[".experts." in name] += parameter.numel()
    active = active_parameters(updates.hf, StageParameters(updates.hf["num_hidden_layers"], sizes[False], sizes[True]))
    torch.cuda.reset_peak_memory_stats()
    seconds, tokens, rates = [], [], []
    for update in range(WARM_UP + UPDATES):
        start = time.perf_counter()
        samples = updates.run(update)
        if update >= WARM_UP:
            seconds.append(time.perf_counter() - start)
            tokens.append(sum(map(len, samples)) / seconds[-1])
            rates.append(3 * sum(forward_flops(updates.hf, active, len(s)) for s in samples) / seconds[-1])
    rate = statistics.median(rates)
    values = (statistics.median(seconds), statistics.median(tokens), rate / 1e12, rate / product)
    return dict(zip(COLUMNS, (*values, torch.cuda.max_memory_allocated() / 2**30), strict=True))


# What a kernel does by its name, which torch, cuBLAS, CUTLASS and Triton give it; the first that fits.
GROUPS = {
    "attention": "flash|fmha|attention",
    "lm head": "logprob|lm_head|linear_log",
    "experts' products": "group",
    "other products": "gemm|nvjet|cutlass|xmma|splitK",
    "SwiGLU": "glu|silu",
    "token pass": "token_pass|megarl|segment",
    "optimizer and gradient norm": "multi_tensor|adam|l2norm",
    "sorts, gathers, scatters": "sort|radix|index|gather|scatter|embedding|scan|cumsum",
    "copies and fills": "memcpy|memset|copy|fill",
    "sums and norms": "reduce|norm|softmax",
    "element by element": "elementwise|vectorized",
}


def kernel_times(folder: Path, size: tuple[int, int, int], way: dict[str, Any]) -> list[dict[str, Any]]:
    """Milliseconds of an update by `GROUPS`, of each kernel that takes a hundredth of it, and without any kernel."""
    updates = Update(folder, size, way)
    for update in range(WARM_UP):
        updates.run(update)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        start = time.perf_counter()
        updates.run(WARM_UP)
        whole = 1e3 * (time.perf_counter() - start)
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    if not (events := device_events(profile)):
        raise RuntimeError("torch's profiler recorded no kernel")
    for event in events:
        for name in (event.name, _group(event.name)):
            times[name] += event.time_range.elapsed_us() / 1e3
            launches[name] += 1
    groups = [name for name in (*GROUPS, "other") if launches[name]]
    single = [name for name, time in times.most_common() if name not in groups and time > whole / 100]
    busy = sum(times[name] for name in groups)
    rows = [("an update, profiled", whole, 0), ("no kernel", whole - busy, 0)]
    rows += [(name, times[name], launches[name]) for name in groups]
    rows += [(f"{_group(name)}: {name[:90]}", times[name], launches[name]) for name in single]
    return [{"what": what, "ms": ms, "launches": n, "share": ms / whole} for what, ms, n in rows]


def _group(kernel: str) -> str:
    return next((name for name, pattern in GROUPS.items() if re.search(pattern, kernel, re.IGNORECASE)), "other")


def missing(way: dict[str, Any]) -> str:
    """Why a way cannot run here; "" if it can."""
    if way["layers"] == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        return "transformer_engine is not installed"
    return "the CUDA kernels are not installed" if way["kernels"] == "cuda" and not find_library("cuda") else ""


def rows(models: dict[str, Any], ways: list[str], side: int = 8192) -> Iterator[dict[str, Any]]:
    """A row per model and way, each measured in a process of its own.

    side: of the square matrices whose product measures the GPU's arithmetic.
    """
    found = torch.cuda.is_available()
    for name, (config, *size) in models.items():
        with tempfile.TemporaryDirectory() as folder:
            if found:
                write_model(config, Path(folder))
                torch.cuda.empty_cache()
            for title in ways:
                row = {"model": name, "layers, kernels": title} | dict.fromkeys(COLUMNS, NOT_MEASURED)
                row["note"] = missing(WAYS[title]) if found else "no GPU"
                if not row["note"]:
                    child = dict(folder=folder, size=size, way=WAYS[title], side=side)
                    row |= in_own_process(__file__, ["--child", json.dumps(child)])
                yield row


def operator_rows(config: dict[str, Any], *size: int) -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return [{"what": "an update, profiled", "ms": NOT_MEASURED, "note": "no GPU"}]
    with tempfile.TemporaryDirectory() as folder:
        write_model(config, Path(folder))
        return kernel_times(Path(folder), size, WAYS["torch, triton"])


def child(folder: str, **arguments: Any) -> dict[str, Any]:
    try:
        return measure(Path(folder), **arguments)
    except Exception as error:  # the other rows are measured nevertheless
        return {"note": f"{type(error).__name__}: {error}".partition("\n")[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", action="store_true")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(**options.child)))
    elif options.operators:
        write_table("operators_gpu", operator_rows(*MODELS["Qwen3-30B-A3B, 2 layers"]))
    else:
        write_table("actor_gpu", list(rows(MODELS, list(WAYS))))


if __name__ == "__main__":
    main()
