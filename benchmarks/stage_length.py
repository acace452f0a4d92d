"""Whether an update costs more in a longer stage: CPU-seconds per update and memory, for stages of several lengths.

Random responses fill sealed stages of --lengths updates. Each length runs in a separate process, which makes --updates
updates at the end of its stage, and reports their CPU time and the growth of peak memory since its first updates.

    python benchmarks/stage_length.py [--lengths 32 1024] [--updates 32]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from megarl.actor import parallel
from megarl.distributed import become_single_process
from megarl.objectives import build_objective
from megarl.phases.samples import to_samples
from megarl.recipe.load import load_recipe
from megarl.storage.metrics import NOTHING, MetricsWriter
from megarl.storage.rollouts import Group, Response, RolloutStore, RolloutWriter, seal
from megarl.storage.run_dir import RunDir

ROOT = Path(__file__).parents[1]


def fill(run: RunDir, vocabulary: int = 28) -> None:
    """Fill and seal the first stage of ``run`` with random responses."""
    rng = np.random.default_rng(0)
    size = run.recipe.rollout.groups_per_chunk

    def response() -> Response:
        tokens = rng.integers(3, vocabulary, rng.integers(4, 10)).astype(np.int32)
        return Response(tokens, rng.uniform(-4, -2, len(tokens)).astype(np.float32), float(rng.integers(2)), "stop", 0)

    directory, groups = run.stage(0).rollouts, run.stage(0).groups
    directory.mkdir(parents=True)
    with RolloutWriter(directory, weights_hash="0" * 64, logprob_mode="processed") as writer:
        for begin in range(0, len(groups), size):
            chunk = groups[begin : begin + size]
            prompts = [rng.integers(3, vocabulary, rng.integers(4, 10)).astype(np.int32) for _ in chunk]
            answers = [tuple(response() for _ in range(run.recipe.rollout.responses_per_prompt)) for _ in chunk]
            writer.append([Group(g, p, a) for g, p, a in zip(chunk, prompts, answers, strict=True)])
    seal(directory, groups)


def measure(length: int, updates: int) -> dict[str, float]:
    """CPU-seconds per update over the last ``updates`` of a stage of ``length`` updates, and growth of peak memory."""
    torch.set_num_threads(1)
    recipe = load_recipe(ROOT / "examples/quickstart/recipe.toml", [f"schedule.updates_per_stage={length}"])
    become_single_process()
    device = parallel.initialize(recipe)
    from megarl.actor import packing, step

    with tempfile.TemporaryDirectory() as scratch:
        run = RunDir.create(Path(scratch) / "run", recipe)
        fill(run)
        store = RolloutStore(run.stage(0).rollouts)
        actor = step.Actor.build(recipe, recipe.model.path, device)
        objective = build_objective("mu_grpo", {})
        metrics = MetricsWriter(run.metrics, NOTHING, b"", 0, recipe.run)
        for _ in range(length):  # a history as long as that of the stage
            metrics.append({"update": 0, "loss": 0.0})

        def update(staleness: int) -> None:
            groups = store.read(run.stage(0).groups_of_update(store.chosen, staleness))
            samples = to_samples(groups, recipe.objective)
            batches = packing.micro_batches(samples, recipe.actor.tokens_per_micro_batch, device)
            metrics.append({"update": staleness, **step.train_step(actor, batches, objective, 1e-5)})

        for staleness in range(8):
            update(staleness)
        memory, start = peak_mebibytes(), time.process_time()
        for staleness in range(length - updates, length):
            update(staleness)
        return {
            "updates_per_stage": length,
            "cpu_seconds_per_update": (time.process_time() - start) / updates,
            "memory_growth_mib": peak_mebibytes() - memory,
        }


def peak_mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 1024])
    parser.add_argument("--updates", type=int, default=32)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.chdir(ROOT)
    if options.one:
        print(json.dumps(measure(options.one, options.updates)))
        return
    print(f"{'updates a stage':>16}{'CPU-s an update':>18}{'memory growth MiB':>20}")
    for length in options.lengths:
        command = [sys.executable, "-W", "ignore", __file__, "--one", str(length), "--updates", str(options.updates)]
        result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        print(f"{length:>16}{result['cpu_seconds_per_update']:>18.4f}{result['memory_growth_mib']:>20.1f}", flush=True)


if __name__ == "__main__":
    main()
