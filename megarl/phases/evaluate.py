"""The evaluate phase: held-out prompts answered by the policy of a stage; avg@k and pass@k with their uncertainty."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from statistics import NormalDist

import numpy as np
import torch.distributed as dist

from megarl.distributed import ReplicaGroup
from megarl.phases.rollout_worker import RolloutWorker
from megarl.phases.scoring import SeededPrompt
from megarl.rollout.engine import never
from megarl.storage.run_dir import Stage

_EVALUATION_SEED = 1 << 40  # apart from the seeds of training responses, which are group ids


def evaluate(stage: Stage) -> None:
    """The phase of an evaluation with engines of its own: of a run's end, of a stage that is generated already."""
    replicas = ReplicaGroup.join()
    if replicas.from_first("there", stage.evaluation() is not None):
        return  # a restart after a process that died between the result and its end
    worker = start_worker(stage, replicas, "evaluate", for_training=False)
    evaluate_policy(stage, worker, replicas)
    worker.close()
    replicas.barrier("evaluated")


def start_worker(stage: Stage, replicas: ReplicaGroup, phase: str, for_training: bool) -> RolloutWorker:
    """An engine that has been found to compute the stage's policy. ``phase``: what it is to do first."""
    start = time.monotonic()
    stage.run.check_prompts()
    policy = stage.run.under_one_path(stage.policy, replicas.rank)
    worker = RolloutWorker.build(stage.run.recipe, stage.number, policy, for_training)
    drift = worker.check_weights(stage.policy, replicas)
    seconds = round(time.monotonic() - start, 3)
    stage.log_event("weight_drift", phase=phase, rank=replicas.rank, load_seconds=seconds, **asdict(drift))
    return worker


def evaluate_policy(
    stage: Stage, worker: RolloutWorker, replicas: ReplicaGroup, interrupted: Callable[[], bool] = never
) -> None:
    """Append one ``evaluation`` event for ``stage.policy``; nothing, where it was interrupted."""
    start = time.monotonic()
    mine = score_heldout(worker, replicas.store, interrupted)
    generated = round(time.monotonic() - start, 3)
    if interrupted():
        return
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
    worker.scoring.over_limit = 0  # of what follows


def score_heldout(
    worker: RolloutWorker, counter: dist.Store, interrupted: Callable[[], bool]
) -> dict[int, list[float]]:
    """Which responses to the held-out prompts that this replica took are right, by prompt number."""
    recipe, prompts = worker.recipe, worker.prompts.heldout()
    size = recipe.rollout.groups_per_chunk if worker.engine.repeats_chunks else 1

    def take() -> Iterator[list[SeededPrompt]]:
        while not interrupted() and (begin := (counter.add("next_evaluation", 1) - 1) * size) < len(prompts):
            batch = prompts[begin : begin + size]
            yield [SeededPrompt(_EVALUATION_SEED + begin + i, prompt) for i, prompt in enumerate(batch)]

    groups = worker.generate(take(), recipe.eval.samples, recipe.eval.temperature, interrupted)
    return {g.seeded.number - _EVALUATION_SEED: [r.correctness for r in g.responses] for g in groups}


def summarise(rewards: np.ndarray) -> dict[str, object]:
    """[prompts, samples] rewards in [0, 1] -> accuracy (avg@k), its 95 % interval and, for k > 1, pass@k."""
    prompts, samples = rewards.shape
    accuracy = float(rewards.mean())
    summary: dict[str, object] = {
        "accuracy": accuracy,
        "ci95": interval(rewards.mean(1), samples),
        "prompts": prompts,
        "samples": samples,
    }
    if samples > 1:
        passed = rewards.max(1)
        summary |= {"pass_at_k": float(passed.mean()), "pass_at_k_ci95": interval(passed)}
    return summary


def interval(scores: np.ndarray, samples: int = 1) -> list[float]:
    """95 % interval of the mean of one score in [0, 1] a prompt, each itself the mean of so many ``samples``.

    Samples of one prompt are correlated, so the prompt is the unit. For one sample, right or wrong, it is Wilson's.
    Else it is Wilson's with the scores' own variance, Student's t for the normal distribution, and one more prompt that
    is right half of the time: a few prompts that happen to agree say little about how prompts differ. It keeps a width
    at accuracy 0 and 1, stays inside [0, 1], and covers the truth in 94 % of the cases or more from 2 prompts on.
    """
    n, mean, z = len(scores), float(scores.mean()), NormalDist().inv_cdf(0.975)
    n_effective = float(n)  # tosses of a coin with the same mean that tell as much
    if samples > 1:
        z, mean = _student_t(n - 1), float((scores.sum() + 0.5) / (n + 1))
        variance = float(((scores - mean) ** 2).sum() + (0.5 - mean) ** 2) / n
        n_effective = min(n * mean * (1 - mean) / variance, n * samples) if variance > 0 else n * samples
    centre = (mean + z * z / (2 * n_effective)) / (1 + z * z / n_effective)
    half = z / (1 + z * z / n_effective) * math.sqrt(mean * (1 - mean) / n_effective + z * z / (4 * n_effective**2))
    return [max(0.0, centre - half), min(1.0, centre + half)]


def _student_t(freedom: int) -> float:
    """The .975 quantile, to 1 %: exact for 1 and 2 degrees of freedom, else its expansion (Abramowitz, Stegun 26.7.5).

    With none there is no variance to estimate, and nothing is known.
    """
    if freedom <= 2:
        return (1e6, math.tan(0.475 * math.pi), 0.95 * math.sqrt(2 / (4 * 0.975 * 0.025)))[freedom]
    z = NormalDist().inv_cdf(0.975)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
