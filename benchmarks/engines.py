"""What an engine does with a pretrained model: its log-probs against the actor's, and wrong weights that are planted.

SmolLM2-135M-Instruct (`examples/smollm2`) is trained for four updates at the recipe's learning rate, without warm-up,
on responses of the engine. Then, with the engine still alone on the machine:

- it loads the policy before and the one after these updates in turn; the drift check must say nothing;
- it answers chat prompts with the new policy, and the actor scores these responses with the same weights;
- it loads wrong weights, and the drift check compares it with the right ones. Each must be found: a layer, or all
  layers, from before the four updates; two tensors swapped; one tensor rounded to bfloat16.

    python benchmarks/engines.py [--engine builtin vllm sglang] [--loads 20] [--runs DIR]

With --runs an engine that was measured before is not measured again. `make test-slow WHAT=engines` installs SGLang.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ROOT, parse_with_threads, write_table
from safetensors.torch import load_file, save_file

from megarl.actor import parallel, reference
from megarl.data.prompts import open_prompts
from megarl.data.tokenizer import stop_token_ids
from megarl.distributed import become_single_process
from megarl.errors import UserError
from megarl.models.hf_config import read_hf_config
from megarl.recipe.load import load_recipe
from megarl.rollout import build_engine, check_engine
from megarl.rollout.drift import measure_drift
from megarl.rollout.engine import EngineFault, Request, RolloutEngine, Sampling, answers, response_seed
from megarl.storage.policies import Reference, read_reference
from megarl.storage.run_dir import RunDir

EXAMPLE = "examples/smollm2"
RECIPE = Path(EXAMPLE, "instructions.toml")
UPDATES, PROMPTS, SAMPLES, TOKENS = 4, 16, 4, 32  # the last three: responses to compare with the actor
SETTINGS = (
    "schedule.stages=1",
    f"schedule.updates_per_stage={UPDATES}",
    "schedule.prompts_per_update=4",
    "optimizer.warmup_updates=0",
    f"rollout.max_response_tokens={TOKENS}",
    "rollout.groups_per_chunk=16",
    "eval.every=0",
)
SGLANG = "rollout.sglang_python=tests/rollout/sglang/python"  # with torch in place of its kernels for AMX
FOUND_BY = {  # a part of the check's message -> what found the wrong weights
    "nats off": "distance",
    "nearer to that one": "previous policy",
    "% of the change": "missing share",
    "bit for bit": "checksum",
}
Weights = dict[str, torch.Tensor]
Fault = Callable[[Weights, Weights], Weights]  # (weights of the new policy, of the old one) -> the tensors that change


def stale(part: str) -> Fault:
    return lambda new, old: {name: old[name] for name in new if name.startswith(part)}


def swapped(one: str, other: str) -> Fault:
    return lambda new, old: {one: new[other], other: new[one]}


def rounded(name: str) -> Fault:
    return lambda new, old: {name: new[name].bfloat16().float()}


LAYER, NEXT = "model.layers.14.", "model.layers.15."  # of 30
KEYS, VALUES, QUERIES = (f"self_attn.{name}_proj.weight" for name in "kvq")
NORMS = "input_layernorm.weight", "post_attention_layernorm.weight"
FAULTS: dict[str, Fault] = {
    **{f"layer {number} old": stale(f"model.layers.{number}.") for number in (0, 14, 29)},
    "all old": stale("model."),
    "keys and values swapped": swapped(LAYER + KEYS, LAYER + VALUES),
    "queries of two layers swapped": swapped(LAYER + QUERIES, NEXT + QUERIES),
    "norms of a layer swapped": swapped(LAYER + NORMS[0], LAYER + NORMS[1]),
    "embedding in bfloat16": rounded("model.embed_tokens.weight"),
    "down projection in bfloat16": rounded(f"{LAYER}mlp.down_proj.weight"),
    "keys in bfloat16": rounded(LAYER + KEYS),
    "norm in bfloat16": rounded(LAYER + NORMS[0]),
}


class Listener:
    """An engine that keeps the first scores that it gives."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine, self.first = engine, list[np.ndarray]()

    def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        scores = self._engine.score(sequences)
        self.first = self.first or scores
        return scores

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def load_and_check(engine: RolloutEngine, weights: Path, right: Reference) -> tuple[np.ndarray, str]:
    """Load ``weights`` as a phase loads another policy, and check them; (distances, what the check says).

    The distances in nats are between the log-probs of the engine and those of the actor with the right weights.
    """
    before = engine.checksum()
    engine.load_weights(weights, UPDATES)
    listener = Listener(engine)
    try:
        said = measure_drift(listener, right, before).warning
    except EngineFault as error:
        said = str(error)
    return apart(listener.first or engine.score(right.sequences), right.logprobs), said


def apart(scores: list[np.ndarray], others: list[np.ndarray]) -> np.ndarray:
    return np.abs(np.concatenate(scores).astype(np.float64) - np.concatenate(others))


def row(engine: str, what: str, distances: np.ndarray, result: str = "") -> dict[str, Any]:
    figures = {"mean": distances.mean(), "99.9 %": np.quantile(distances, 0.999), "max": distances.max()}
    figures = {f"{name}, nats": float(value) for name, value in figures.items()}
    return {"engine": engine, "what": what, "tokens": len(distances), **figures, "drift check": result}


def train(recipe_settings: list[str], root: Path) -> RunDir:
    """The finished run; an interrupted one is continued."""
    settings = [word for setting in recipe_settings for word in ("--set", setting)]
    command = [sys.executable, "-W", "ignore", "-m", "megarl.cli", "train", RECIPE, "--run-dir", root, *settings]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return RunDir.open(root)


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def actor_logprobs(root: Path, sequences: list[list[int]]) -> list[np.ndarray]:
    """The log-probs that the actor with the run's last policy gives all tokens but the first."""
    become_single_process()
    run = RunDir.open(root)
    device = parallel.initialize(run.recipe)
    from megarl.actor.step import Actor

    actor = Actor.build(run.recipe, run.final, device)
    return reference.score(actor.models, sequences, run.recipe.actor.tokens_per_micro_batch, device)


def at_staleness_0(name: str, engine: RolloutEngine, run: RunDir) -> dict[str, Any]:
    """The engine, which has the run's last policy, answers chat prompts, and the actor scores its answers."""
    tokenizer, source = open_prompts(run.recipe, run.final)
    prompts = [list(source.train(number).tokens) for number in range(PROMPTS)]
    seeds = tuple(response_seed(0, prompt, k) for prompt in range(PROMPTS) for k in range(SAMPLES))
    how = Sampling(1.0, TOKENS, SAMPLES, tuple(stop_token_ids(tokenizer, run.final)), seeds)
    responses = answers(engine, Request(prompts, how))
    texts = [[*prompts[response.prompt], *response.tokens.tolist()] for response in responses]
    scores = in_new_process(actor_logprobs, run.root, texts)
    own = [score[-len(response.tokens) :] for score, response in zip(scores, responses, strict=True)]
    distances = apart([response.logprobs for response in responses], own)
    return row(name, f"{len(responses)} responses at staleness 0", distances)


def right_loads(name: str, engine: RolloutEngine, policies: list[tuple[Path, Reference]], loads: int) -> dict[str, Any]:
    found = [load_and_check(engine, *policies[number % 2]) for number in range(loads)]
    alarms = [said for _, said in found if said]
    result = f"{len(alarms)} alarms: {alarms[0]}" if alarms else "no alarm"
    return row(name, f"right weights, {loads} loads", np.concatenate([distances for distances, _ in found]), result)


def wrong_weights(name: str, engine: RolloutEngine, run: RunDir, right: Reference) -> list[dict[str, Any]]:
    new, old = (load_file(policy / "model.safetensors") for policy in (run.final, run.base))
    rows = []
    for what, fault in FAULTS.items():
        with tempfile.TemporaryDirectory(dir=run.root.parent) as folder:
            wrong = Path(folder, "policy")
            shutil.copytree(run.final, wrong, ignore=shutil.ignore_patterns("*.safetensors*"))
            save_file(new | fault(new, old), wrong / "model.safetensors", {"format": "pt"})
            distances, said = load_and_check(engine, wrong, right)
        ways = [way for part, way in FOUND_BY.items() if part in said]
        rows.append(row(name, what, distances, f"found: {ways[0]}" if said else "not found"))
    return rows


def measure(name: str, folder: Path, loads: int) -> list[dict[str, Any]]:
    """The rows of one engine; it must be called in a process of its own."""
    settings = [*SETTINGS, SGLANG, f"rollout.engine={name}"]
    recipe = load_recipe(RECIPE, settings)
    try:
        check_engine(recipe, 0, read_hf_config(recipe.model.path))
    except UserError as error:
        return [{"engine": name, "what": "not run", "drift check": str(error).replace(f"{ROOT}/", "")}]
    run = train(settings, folder / "run")
    old, new = read_reference(run.stage(0).directory), read_reference(run.final)
    assert old is not None and new is not None and new.previous is not None
    rows = [row(name, f"{UPDATES} updates", apart(new.previous, new.logprobs))]
    engine = build_engine(recipe, 0, run.final, UPDATES)
    rows.append(at_staleness_0(name, engine, run))
    rows.append(right_loads(name, engine, [(run.base, old), (run.final, new)], loads))
    rows += wrong_weights(name, engine, run, new)
    engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", default=["builtin", "vllm", "sglang"])
    parser.add_argument("--loads", type=int, default=20)
    parser.add_argument("--runs", type=Path, help="keep runs and figures here")
    options = parse_with_threads(parser)
    os.chdir(ROOT)
    for script in ("make_base.py", "tasks.py"):
        subprocess.run([sys.executable, "-W", "ignore", f"{EXAMPLE}/{script}"], check=True)
    rows = []
    with tempfile.TemporaryDirectory(prefix="megarl-engines-") as scratch:
        for name in options.engine:
            folder = (options.runs or Path(scratch)).absolute() / name
            folder.mkdir(parents=True, exist_ok=True)
            figures = folder / "rows.json"
            if not figures.exists():
                figures.write_text(json.dumps(in_new_process(measure, name, folder, options.loads)))
            rows += json.loads(figures.read_text())
    write_table("engines", rows)


if __name__ == "__main__":
    main()
