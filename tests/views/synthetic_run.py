"""Synthetic run directories, with the recipe, metrics and events of a run of three stages of 96 updates.

Also given responses, written by megarl's own writer, and a tokenizer of a few words.
"""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models

from megarl.recipe.load import dump_recipe
from megarl.recipe.tables import Recipe
from megarl.storage.rollouts import Group, Response, RolloutWriter, seal
from megarl.views.report.curves import CURVES
from tests.helpers import read_lines

START = 1_700_000_000.0
ACCURACY = (0.281, 0.613, 0.815, 0.902)
EXPERTS = ("experts/", "router/", "routing/")  # metrics of models with experts
HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07",  # clears a terminal and names its window
    "\x9b31m",  # the same kind of sequence in one character
    "\rhidden\b\x7f\x00",
    "\u202eesrever\u2028",
    "\nstage 9 · prompt 9 · sample 9 · reward 1 · 1 tokens · stop · policy 9",
    "<img src=http://example.com/x.png onerror=alert(1)>",
    "</pre></template></details><script>alert(2)</script><!--",
    "[bold red]:smile:[/bold red]",
)
WORDS = ("<eos>", "a", " b", " c", " answer", "\n", *HOSTILE)


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
    age = staleness / size  # the share of a stage
    curves = {name: 0.1 + age for _, _, metrics, _ in CURVES for name in metrics if not name.startswith(EXPERTS)}
    if number % 48 == 0:  # as metrics.detail = 48 adds it
        curves["entropy_by_ratio"] = {"counts": [[round(1000 * age), 2], [3, 4]]}
    return curves | {
        "stage": stage,
        "update": number,
        "staleness": staleness,
        "reward/mean": 0.28 + 0.62 * (1 - math.exp(-stage)) + noise.gauss(0, 0.03),
        "loss": noise.gauss(-0.02, 0.02),
        "ess": 1 / (1 + (0.02 + 0.5 * age) ** 2),
        "clip_fraction": 0.004 * age,
        "clip_fraction/positive": 0.004 * age,
        "veto_fraction": 0.05 * age**2,
        "veto_fraction/negative": 0.1 * age**2,
        "tokens": 2000,
        "trained_tokens": 1000,
        "seconds": 0.1,
    }


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def change_lines(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Write a file of JSON lines again with ``change(record)`` of each."""
    write_lines(path, list(map(change, read_lines(path))))


def make_events(recipe: Recipe) -> list[dict[str, Any]]:
    events, now = [], START

    def phase(name: str, stage: int, seconds: float) -> None:
        nonlocal now
        events.append({"time": now, "event": "phase_start", "phase": name, "stage": stage, "processes": 1})
        now += seconds
        if name == "evaluate":
            accuracy = ACCURACY[min(stage, 3)]
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


def make_run(root: Path, *, seed: int = 0, recipe: Recipe | None = None) -> Path:
    recipe = recipe or make_recipe()
    root.mkdir(parents=True)
    noise, size = random.Random(seed), recipe.schedule.updates_per_stage
    (root / "recipe.toml").write_text(dump_recipe(recipe))
    updates = [update_record(n, size, noise) for n in range(1, recipe.schedule.total_updates + 1)]
    write_lines(root / "metrics.jsonl", updates)
    write_lines(root / "events.jsonl", make_events(recipe))
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


def write_words(folder: Path) -> None:
    """A tokenizer whose tokens are `WORDS`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<eos>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def response(tokens, reward=0.0, finish="stop", version=0, **fields) -> Response:
    tokens = np.array(tokens, np.int32)
    logprobs = -0.1 * np.arange(1, len(tokens) + 1, dtype=np.float32)
    return Response(tokens, logprobs, reward, finish, version, **fields)


def random_groups(ids, samples=4, seed=0) -> list[Group]:
    noise, prompt = random.Random(seed), np.array([1, 2], np.int32)

    def one() -> Response:
        tokens = [noise.randrange(1, 6) for _ in range(noise.randrange(1, 20))]
        finish = noise.choice(["stop", "stop", "length", "timeout"])
        return response(tokens, noise.choice([0.0, 0.25, 1.0]), finish, seed)

    return [Group(number, prompt, tuple(one() for _ in range(samples))) for number in ids]


def store(directory: Path, shards: list[list[Group]], sealed: bool = True) -> None:
    with RolloutWriter(directory, weights_hash="w" * 64, logprob_mode="processed") as writer:
        for shard in shards:
            writer.append(shard)
    if sealed:
        ids = [group.group_id for shard in shards for group in shard]
        seal(directory, range(min(ids), max(ids) + 1))


def make_stored_run(root: Path, stages: list[list[list[Group]]], **options) -> Path:
    """A run with all updates, whose stages have these shards; a shard is a list of groups."""
    make_run(root, **options)
    write_words(root / "stages/000/policy")
    for number, shards in enumerate(stages):
        store(root / f"stages/{number:03d}/rollouts", shards)
    return root


def two_stages(root: Path) -> tuple[Path, list[tuple[int, Group]]]:
    """(a run with rollouts of two stages in two shards each, all its groups as (stage, group))."""
    shards = [[random_groups(range(first, first + 3), seed=first) for first in pair] for pair in ((0, 3), (6, 9))]
    groups = [(stage, group) for stage, pair in enumerate(shards) for shard in pair for group in shard]
    return make_stored_run(root, shards), groups
