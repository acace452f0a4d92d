"""Synthetic run directories, with the recipe, metrics and events that a run of three stages of 96 updates leaves."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.recipe.load import dump_recipe
from megarl.recipe.tables import Recipe
from tests.helpers import read_lines

START = 1_700_000_000.0
ACCURACY = (0.281, 0.613, 0.815, 0.902)


def make_recipe(schedule: dict[str, int] | None = None, **objective: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"path": "base"},
            "data": {"source": "reasoning_gym", "train": "spell_backward", "prompt_template": "{word}="},
            "reward": {"kind": "reasoning_gym"},
            "schedule": {"stages": 3, "updates_per_stage": 96, "prompts_per_update": 16} | (schedule or {}),
            "objective": {"name": "mu_grpo", "veto_threshold": 1e-3, **objective},
            "optimizer": {"lr": 1e-4, "warmup_updates": 15},
        }
    )


def update_record(number: int, size: int, noise: random.Random) -> dict[str, Any]:
    stage, staleness = divmod(number - 1, size)
    age, progress = staleness / size, number / (3 * size)  # the share of a stage, and of the run
    spread = 0.02 + 0.5 * age
    reward = 0.28 + 0.62 * (1 - math.exp(-stage)) + noise.gauss(0, 0.03)
    square_mean = 1 + spread**2
    detail = {  # as metrics.detail = 48 adds it
        "prefix_occupancy/q01": math.exp(-12 * age),
        "prefix_occupancy/q50": math.exp(-age),
        "prefix/reverse_chi2": math.exp(6 * age),
        "entropy_by_ratio": {"counts": [[round(1000 * age), 2], [3, 4]]},
    }
    return {
        "stage": stage,
        "update": number,
        "staleness": staleness,
        "reward/mean": reward,
        "correct/mean": 0.9 * reward,
        "kl/k1": 0.1 * age,
        "kl/k3": 0.11 * age,
        "zero_variance_fraction": 0.1 + 0.4 * progress,
        "response_tokens/mean": 7.2 + noise.gauss(0, 0.1),
        "truncated_fraction": 0.01,
        "loss": noise.gauss(-0.02, 0.02),
        **{
            f"ratio/q{q}": math.exp(spread * z)
            for q, z in (("01", -2.3), ("05", -1.6), ("50", 0), ("95", 1.6), ("99", 2.3))
        },
        "ratio/mean": 1.0,
        "ratio/square_mean": square_mean,
        "ess": 1 / square_mean,
        "clip_fraction": 0.004 * age,
        "clip_fraction/positive": 0.004 * age,
        "veto_fraction": 0.05 * age**2,
        "veto_fraction/negative": 0.1 * age**2,
        "ratio/mean/positive": 1 + 0.1 * age,
        "ratio/mean/negative": 1 - 0.4 * age,
        "positive_share/tokens": 0.3 + 0.3 * progress,
        "positive_share/loss": 0.4 + 0.1 * progress,
        "bapo/ratio_min": 0.9 - 0.3 * age,
        "bapo/ratio_max": 1.2 + 1.8 * age,
        "dampen/prefix/good_prefix": 0.02 + 0.2 * age,
        "dampen/prefix/bad_prefix": 0.05 + 0.9 * age,
        "response_tokens/positive": 6.5,
        "response_tokens/negative": 7.8,
        **(detail if number % 48 == 0 else {}),
        "m2/before": spread**2,
        "m2/after": 0.7 * spread**2,
        "entropy": 0.9 - 0.6 * progress + noise.gauss(0, 0.01),
        "grad_norm": 0.3 + 0.3 * noise.random(),
        "lr": 1e-4 * min(1, number / 15),
        "tokens": 2000,
        "trained_tokens": 1000,
        "seconds": 0.1,
        "tokens_per_second": 20000.0,
    }


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def change_lines(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Write a file of JSON lines again with ``change(record)`` of each."""
    write_lines(path, list(map(change, read_lines(path))))


def make_events(recipe: Recipe, gain: float = 1.0) -> list[dict[str, Any]]:
    events, now = [], START

    def phase(name: str, stage: int, seconds: float) -> None:
        nonlocal now
        events.append({"time": now, "event": "phase_start", "phase": name, "stage": stage, "processes": 1})
        now += seconds
        if name == "evaluate":
            accuracy = ACCURACY[0] + gain * (ACCURACY[min(stage, 3)] - ACCURACY[0])
            half = 1.96 * math.sqrt(accuracy * (1 - accuracy) / 1024)
            interval = [accuracy - half, accuracy + half]
            events.append(
                {"time": now, "event": "evaluation", "stage": stage, "accuracy": accuracy, "ci95": interval}
                | {"update": stage * recipe.schedule.updates_per_stage, "suite": "heldout"}
                | {"prompts": 1024, "samples": 1, "policy": f"stages/{stage:03d}/policy", "seconds": seconds}
            )
        events.append({"time": now, "event": "phase_end", "phase": name, "stage": stage, "seconds": seconds})

    for stage in range(recipe.schedule.stages):
        phase("evaluate", stage, 4.0)
        phase("rollout", stage, 11.0 + stage)
        phase("optimize", stage, 17.0 - stage)
    phase("evaluate", recipe.schedule.stages, 4.0)
    return events


def make_run(root: Path, *, seed: int = 0, gain: float = 1.0, recipe: Recipe | None = None) -> Path:
    recipe = recipe or make_recipe()
    root.mkdir(parents=True)
    noise, size = random.Random(seed), recipe.schedule.updates_per_stage
    (root / "recipe.toml").write_text(dump_recipe(recipe))
    updates = [update_record(n, size, noise) for n in range(1, recipe.schedule.total_updates + 1)]
    write_lines(root / "metrics.jsonl", updates)
    write_lines(root / "events.jsonl", make_events(recipe, gain))
    return root


def make_branch(root: Path, of: Path, stage: int) -> Path:
    """A branch as `megarl optimize --stage STAGE --output` makes it: updates of one stage, a link to its rollouts."""
    make_run(root)
    place = f"stages/{stage:03d}/rollouts"
    for each in (of / place, (root / place).parent):
        each.mkdir(parents=True)
    (root / place).symlink_to(of / place)
    updates, events = (read_lines(root / f"{name}.jsonl") for name in ("metrics", "events"))
    write_lines(root / "metrics.jsonl", [line for line in updates if line["stage"] == stage])
    kept = [line for line in events if line["event"] == "evaluation" and line["stage"] in (stage, stage + 1)]
    write_lines(root / "events.jsonl", kept)
    return root
