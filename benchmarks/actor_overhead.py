"""The cost of an update of the actor, compared with the same forward, backward and step in plain Megatron-Core.

All sides have the same weights, packed micro-batches, schedule, DDP and distributed optimizer. They run in one process
and thread and take turns after each update, so that other load on the machine slows all of them alike. Times are
CPU-seconds; ratios are medians over the turns.

- `plain` is GPTModel's own loss and MegatronOptimizer.step.
- `linear_logprob` replaces full logits and cross-entropy by megarl's log-prob op, with -log-prob * advantage as loss.
  The cost of megarl beyond it is that of the objective, its metrics and the checks for finite numbers.

m2po's exact threshold needs all log-probs before the first backward pass, so it is compared with sides that run the
forward pass twice. Only megarl's time includes packing.

    python benchmarks/actor_overhead.py [--turns 15] [--objectives mu_grpo m2po] [--sizes small medium]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from common import write_table
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from megarl.actor import parallel
from megarl.distributed import become_single_process
from megarl.objectives import build_objective
from megarl.recipe.load import parse_recipe
from megarl.recipe.tables import Recipe

VOCABULARY = 4096
SIZES = {
    "small": dict(hidden_size=128, num_hidden_layers=4, num_experts=8, moe_intermediate_size=64),
    "medium": dict(hidden_size=384, num_hidden_layers=6, num_experts=8, moe_intermediate_size=192),
}
LIMIT = 1.05  # accepted ratio of megarl to plain; printed with the worst ratio


def make_recipe(folder: Path, size: str) -> Recipe:
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, intermediate_size=256, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
        num_experts_per_tok=2, max_position_embeddings=2048, norm_topk_prob=True, **SIZES[size],
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return parse_recipe(
        {
            "model": {"path": str(folder)},
            "data": {"source": "reasoning_gym", "train": "spell_backward"},
            "reward": {"kind": "reasoning_gym"},
            "actor": {"backend": "cpu", "tokens_per_micro_batch": 2048},
        }
    )


def make_samples(rng: np.random.Generator) -> list[Any]:
    """32 responses of 32 to 384 tokens, as a run with a 384-token limit would have them."""
    from megarl.actor.packing import Sample

    def one() -> Any:
        prompt, response = (rng.integers(0, VOCABULARY, n) for n in (64, rng.integers(32, 384)))
        logprobs = rng.normal(-8.3, 0.3, len(response)).astype(np.float32)
        return Sample(prompt, response, logprobs, float(rng.normal()))

    return [one() for _ in range(32)]


def megarl_side(recipe: Recipe, name: str) -> Callable[[list[Any]], float]:
    from megarl.actor import packing, step

    actor = step.Actor.build(recipe, recipe.model.path, torch.device("cpu"))
    objective = build_objective(name, {})

    def update(samples: list[Any]) -> float:
        start = time.process_time()
        batches = packing.micro_batches(samples, recipe.actor.tokens_per_micro_batch, actor.device)
        step.train_step(actor, batches, objective, lr=1e-6)
        return time.process_time() - start

    return update


def plain_side(recipe: Recipe, full_logits: bool, twice: bool) -> Callable[[list[Any]], float]:
    """The training loop of Megatron-Core's examples. twice: with a forward pass without gradient first."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megarl.actor import packing, step

    actor = step.Actor.build(recipe, recipe.model.path, torch.device("cpu"))
    if full_logits:
        actor.models[0].__class__ = GPTModel  # its own _postprocess: logits, cross-entropy

    def forward_step(batches: Any, model: torch.nn.Module) -> Any:
        batch = next(batches)
        output = model(batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=batch.packed)

        def loss(output: Any) -> Any:
            values = -output[0][batch.packed.trained] if full_logits else output[0]
            total = -(values * batch.advantages).sum()
            return total, torch.tensor(batch.token_count, dtype=torch.int), {"loss": total.detach()}

        return output, loss

    def run(batches: list[Any], forward_only: bool) -> None:
        with torch.set_grad_enabled(not forward_only):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(batches),
                model=actor.replicas[0],
                num_microbatches=len(batches),
                seq_length=2048,
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def update(samples: list[Any]) -> float:
        batches = packing.micro_batches(samples, recipe.actor.tokens_per_micro_batch, actor.device)
        start = time.process_time()
        if twice:
            run(batches, forward_only=True)
        for replica in actor.replicas:
            replica.zero_grad_buffer()
        actor.optimizer.zero_grad()
        run(batches, forward_only=False)
        actor.optimizer.step()
        return time.process_time() - start

    return update


def measure(size: str, name: str, turns: int) -> list[dict[str, Any]]:
    twice = build_objective(name, {}).needs_statistics
    with tempfile.TemporaryDirectory() as folder:
        recipe = make_recipe(Path(folder), size)
        sides = {
            "plain": plain_side(recipe, True, twice),
            "linear_logprob": plain_side(recipe, False, twice),
            "megarl": megarl_side(recipe, name),
        }
    times: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(turns + 2):
        samples = make_samples(np.random.default_rng(turn))
        for side, update in sides.items():
            seconds = update(samples)
            if turn >= 2:  # the first two warm up
                times[side].append(seconds)

    def ratio(side: str) -> float:
        return statistics.median(a / b for a, b in zip(times["megarl"], times[side], strict=True))

    row: dict[str, Any] = {"model": size, "objective": name, "forwards": 1 + twice}
    row |= {f"{side} CPU-s": statistics.median(values) for side, values in times.items()}
    return [row | {"megarl / plain": ratio("plain"), "megarl / linear_logprob": ratio("linear_logprob")}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--objectives", nargs="+", default=["mu_grpo", "m2po"])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    become_single_process()
    with tempfile.TemporaryDirectory() as folder:
        parallel.initialize(make_recipe(Path(folder), "small"))
    pairs = itertools.product(options.sizes, options.objectives)
    rows = [row for size, name in pairs for row in measure(size, name, options.turns)]
    write_table("actor_overhead", rows)
    worst = max(row["megarl / plain"] for row in rows)
    print(f"an update costs at most {worst:.3f} times one of plain Megatron-Core; the limit is {LIMIT}")


if __name__ == "__main__":
    main()
