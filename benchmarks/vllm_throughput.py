"""Whether a rollout phase keeps vLLM as busy as vLLM alone: tokens per second of the phase and of `LLM.generate`.

Both use the same engine, prompts and seeds, on one CPU thread. The phase in addition has the queue of requests,
log-probs as arrays, decoding to text, rewards and the shards on disk. The two take turns, and each goes first equally
often. CPU seconds count, since other processes on the machine disturb them least.

    python benchmarks/vllm_throughput.py [--groups 32] [--tokens 32] [--turns 12]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import ROOT, write_table
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from megarl.data.prompts import Prompt
from megarl.phases.rollout_worker import RolloutWorker
from megarl.recipe.load import load_recipe
from megarl.recipe.tables import Recipe
from megarl.rollout.engine import response_seed
from megarl.rollout.vllm import VllmEngine, engine_arguments
from megarl.storage.policies import copy_policy
from megarl.storage.rollouts import RolloutWriter

SAMPLES = 8


def make_model(folder: Path) -> Path:
    """A random dense model of 4.8M parameters with the quickstart's tokenizer."""
    sys.path.insert(0, str(ROOT / "examples/quickstart"))
    from make_base import write_initial_model

    write_initial_model(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(AutoTokenizer.from_pretrained(folder)),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def phase(worker: RolloutWorker, groups: range, scratch: Path) -> int:
    """Generate and store ``groups`` as a rollout phase does once its engine has started; returns the tokens."""
    tokens = 0
    with RolloutWriter(scratch, weights_hash=worker.weights_hash, logprob_mode="processed") as writer:
        chunks = [*([group] for group in groups), None]
        for portion in worker.generate(lambda: chunks.pop(0), worker.prompts.train, worker.sampling()):
            writer.append(portion)
            tokens += sum(len(response.tokens) for group in portion for response in group.responses)
    return tokens


def bare(llm: Any, worker: RolloutWorker, prompts: list[Prompt], groups: range) -> int:
    """Generate the same responses with `LLM.generate`; returns the tokens."""
    from vllm import SamplingParams

    table = worker.recipe.rollout
    requests = [{"prompt_token_ids": list(prompt.tokens)} for prompt in prompts for _ in range(SAMPLES)]
    parameters = [
        SamplingParams(
            temperature=table.temperature,
            seed=response_seed(worker.recipe.run.seed, group, k),
            max_tokens=table.max_response_tokens,
            stop_token_ids=list(worker.stop_token_ids),
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
        )
        for group, k in itertools.product(groups, range(SAMPLES))
    ]
    outputs = llm.generate(requests, parameters, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def timed(run: Callable[[], int]) -> tuple[int, float, float]:
    """(result of ``run``, CPU seconds, seconds)."""
    wall, cpu = time.perf_counter(), time.process_time()
    return run(), time.process_time() - cpu, time.perf_counter() - wall


def take_turns(recipe: Recipe, policy: Path, size: int, turns: int, scratch: Path) -> list[dict[str, Any]]:
    from vllm import LLM

    worker = RolloutWorker(recipe, 0, policy)
    engine = worker.engine
    assert isinstance(engine, VllmEngine)
    engine.sleep()
    llm = LLM(**engine_arguments(policy, engine.settings))
    engine._engine = llm.llm_engine  # one engine for both
    rows = []
    for turn in range(-1, turns):  # the first one warms up
        groups = range((turn + 1) * size, (turn + 2) * size)
        prompts = [worker.prompts.train(group) for group in groups]
        through_phase = partial(phase, worker, groups, scratch / str(turn))
        alone = partial(bare, llm, worker, prompts, groups)
        results = {}
        for run in (through_phase, alone) if turn % 2 else (alone, through_phase):
            results[run] = timed(run)
            llm.reset_prefix_cache()
        (tokens, cpu, wall), (bare_tokens, bare_cpu, bare_wall) = results[through_phase], results[alone]
        row = {
            "turn": turn,
            "responses": size * SAMPLES,
            "decoded together": engine.settings.responses,
            "tokens": tokens,
            "bare tokens": bare_tokens,
            "shards": len(list((scratch / str(turn)).glob("*.arrow"))),
            "tokens per CPU second": tokens / cpu,
            "bare tokens per CPU second": bare_tokens / bare_cpu,
            "tokens per second": tokens / wall,
            "bare tokens per second": bare_tokens / bare_wall,
        }
        rows += [row] if turn >= 0 else []
    engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=32, help=f"prompts per turn, with {SAMPLES} responses each")
    parser.add_argument("--tokens", type=int, default=32, help="token limit of a response")
    parser.add_argument("--turns", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model, policy = make_model(Path(folder) / "model"), Path(folder) / "policy"
        settings = ["rollout.engine=vllm", f"rollout.max_response_tokens={options.tokens}", f'model.path="{model}"']
        recipe = load_recipe(ROOT / "examples/quickstart/recipe.toml", [*settings, "rollout.groups_per_chunk=8"])
        copy_policy(model, model, policy)
        rows = take_turns(recipe, policy, options.groups, options.turns, Path(folder))
    shares = [row["tokens per CPU second"] / row["bare tokens per CPU second"] for row in rows]
    for row, share in zip(rows, shares, strict=True):
        row["share of bare"] = share
    write_table("vllm_throughput", rows)
    print(f"the phase reaches {statistics.median(shares):.1%} of bare LLM.generate (median, by CPU time)")


if __name__ == "__main__":
    main()
