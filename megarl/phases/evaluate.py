"""The evaluate phase: held-out prompts answered by the policy of a stage; avg@k and pass@k with their uncertainty."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from statistics import NormalDist

import numpy as np
import torch.distributed as dist

from megarl.distributed import ReplicaGroup
from megarl.phases.rollout_worker import RolloutWorker
from megarl.phases.scoring import SeededPrompt
from megarl.storage.run_dir import Stage

_EVALUATION_SEED = 1 << 40  # apart from the seeds of training responses, which are group ids


def evaluate(stage: Stage) -> None:
    """Append one ``evaluation`` event for ``stage.policy``."""
    replicas = ReplicaGroup.join()
    start = time.monotonic()
    worker = RolloutWorker.build(stage.run.recipe, stage.number, stage.policy, for_training=False)
    drift = worker.check_weights(stage.policy, replicas)
    stage.log_event("weight_drift", phase="evaluate", rank=replicas.rank, **asdict(drift))
    generation = time.monotonic()
    mine = score_heldout(worker, replicas.store)
    generated = round(time.monotonic() - generation, 3)
    worker.close()
    everyone = replicas.gather("rewards", {"rewards": list(mine.items()), "over_limit": worker.scoring.over_limit})
    if replicas.rank == 0:
        rewards = {index: values for part in everyone for index, values in part["rewards"]}
        stage.log_event(
            "evaluation",
            policy=str(stage.policy.relative_to(stage.run.root)),
            **summarise(np.array([rewards[i] for i in sorted(rewards)])),
            over_limit=sum(part["over_limit"] for part in everyone),
            temperature=stage.run.recipe.eval.temperature,
            generate_seconds=generated,
            seconds=round(time.monotonic() - start, 3),
        )
    replicas.barrier("evaluated")


def score_heldout(worker: RolloutWorker, counter: dist.Store) -> dict[int, list[float]]:
    """Rewards of the held-out prompts that this replica took, by prompt number."""
    recipe, prompts = worker.recipe, worker.prompts.heldout()
    size = recipe.rollout.groups_per_chunk if worker.engine.repeats_chunks else 1

    def take() -> Iterator[list[SeededPrompt]]:
        while (begin := (counter.add("next_evaluation", 1) - 1) * size) < len(prompts):
            batch = prompts[begin : begin + size]
            yield [SeededPrompt(_EVALUATION_SEED + begin + i, prompt) for i, prompt in enumerate(batch)]

    groups = worker.generate(take(), recipe.eval.samples, recipe.eval.temperature)
    return {g.seeded.number - _EVALUATION_SEED: [r.reward for r in g.responses] for g in groups}


def summarise(rewards: np.ndarray) -> dict[str, object]:
    """[prompts, samples] rewards in [0, 1] -> accuracy (avg@k), its 95 % interval and, for k > 1, pass@k."""
    prompts, samples = rewards.shape
    accuracy = float(rewards.mean())
    summary: dict[str, object] = {
        "accuracy": accuracy,
        "ci95": interval(rewards.mean(1)),
        "prompts": prompts,
        "samples": samples,
    }
    if samples > 1:
        passed = rewards.max(1)
        summary |= {"pass_at_k": float(passed.mean()), "pass_at_k_ci95": interval(passed)}
    return summary


def interval(scores: np.ndarray) -> list[float]:
    """95 % interval of the mean of one score in [0, 1] a prompt: Wilson's with the scores' own variance.

    Samples of one prompt are correlated, so the prompt is the unit. Unlike mean +- 1.96 standard errors it keeps a
    width at accuracy 0 and 1 and stays inside [0, 1].
    """
    n, mean = len(scores), float(scores.mean())
    z = NormalDist().inv_cdf(0.975)
    # n scores in [0, 1] tell as much as n_effective tosses of a coin with the same mean and their variance
    coin, variance = mean * (1 - mean), float(scores.var())
    n_effective = n * coin / variance if variance > 0 and coin > 0 else n
    centre = (mean + z * z / (2 * n_effective)) / (1 + z * z / n_effective)
    half = z / (1 + z * z / n_effective) * math.sqrt(coin / n_effective + z * z / (4 * n_effective**2))
    return [max(0.0, centre - half), min(1.0, centre + half)]
