"""Whole runs on the GPU from a prompt file: the quickstart, killed once and resumed, and runs of other engines."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import string
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.gpu.steps import ROOT

GAIN = 0.05  # in held-out accuracy; the quickstart gains several times as much
WORDS = 6000
RECIPE = "examples/quickstart/recipe.toml"


def settings(work: Path, small: bool) -> list[str]:
    """Words from a file instead of reasoning-gym's, the GPU, and only two stages, whose phases start slowly there."""
    prompts = work / "prompts.jsonl"
    rng = random.Random(0)
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8))) for _ in range(WORDS)]
    rows = [json.dumps({"prompt": word, "answer": word[::-1]}) for word in dict.fromkeys(words)]
    prompts.write_text("\n".join(rows) + "\n")
    values = ['data.source="file"', f'data.train="{prompts}"', "data.options={}", 'data.prompt_template="{prompt}="']
    values += ['reward.kind="exact"', 'actor.backend="cuda"', "run.tensorboard=false", "schedule.stages=2"]
    if small:
        values += ["schedule.updates_per_stage=4", "schedule.prompts_per_update=4"]
        values += ["eval.prompts=16", "eval.every=2", "actor.checkpoint_every=2", 'actor.kernels="torch"']
    return values


def options_of(values: list[str]) -> list[str]:
    return [part for value in values for part in ("--set", value)]


def base(work: Path, small: bool) -> list[str]:
    output, values = work / "base", settings(work, small)
    if not output.exists():
        script = [sys.executable, "-W", "ignore", "examples/quickstart/make_base.py", "--output", str(output)]
        subprocess.run([*script, *["--steps", "2"] * small, *options_of(values)], check=True, cwd=ROOT)
    return [f'model.path="{output}"', *values]


def command(run: Path, values: list[str], *arguments: str) -> list[str]:
    train = [sys.executable, "-m", "megarl.cli", "train", RECIPE, "--run-dir", str(run)]
    return [*train, *arguments, *options_of(values)]


def kill_and_finish(run: Path, values: list[str], updates: int) -> None:
    """Kill `megarl train` once the run has a checkpoint; started again, it makes each of its updates once."""
    process = subprocess.Popen(command(run, values), cwd=ROOT)
    while not list(run.glob("stages/000/checkpoints/update_*")):
        assert process.poll() is None, f"megarl train ended with {process.returncode} before its first checkpoint"
        time.sleep(0.01)
    process.kill()
    process.wait()
    subprocess.run(command(run, values), check=True, cwd=ROOT)
    made = lines(run / "metrics.jsonl")
    assert [line["update"] for line in made] == list(range(1, updates + 1)), "an update is missing or repeated"
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in made)
    print_drift(run)


def lines(path: Path, event: str | None = None) -> list[dict[str, Any]]:
    found = map(json.loads, path.read_text().splitlines())
    return [line for line in found if event is None or line["event"] == event]


def print_drift(run: Path) -> list[dict[str, Any]]:
    drifts = lines(run / "events.jsonl", "weight_drift")
    for event in drifts:
        print(
            f"stage {event['stage']} {event['phase']}: {event['mean']:.4f} nats in the mean of {event['tokens']} "
            f"tokens, {event['max']:.4f} at most; of sampled tokens {event['sampled']:.4f}"
        )
    return drifts


def quickstart(work: Path, small: bool) -> None:
    run, values = work / "run", [*base(work, small), "run.rehearse=false"]
    kill_and_finish(run, values, updates=2 * 4 if small else 2 * 96)
    accuracy = [event["accuracy"] for event in lines(run / "events.jsonl", "evaluation")]
    print(f"held-out accuracy by stage: {', '.join(f'{a:.3f}' for a in accuracy)}")
    assert small or accuracy[-1] > accuracy[0] + GAIN, "the policy did not improve"


def live(work: Path, small: bool) -> None:
    run, values = work / "live", base(work, small)
    values += ['schedule.kind="live"', "schedule.colocate=true", "schedule.stages=1"]
    updates, sync = (4, 2) if small else (48, 8)
    values += [f"schedule.updates_per_stage={updates}", f"schedule.sync_every={sync}", "eval.every=0"]
    values += [f"schedule.max_lag={2 * sync - 1}", f"actor.checkpoint_every={sync}"]
    kill_and_finish(run, values, updates)
    for event in lines(run / "events.jsonl", "idle"):
        print(f"{event['role']}: idle {event['idle_seconds']} of {event['seconds']} s")


def engine(work: Path, small: bool, name: str) -> None:
    run, values = work / f"run-{name}", [*base(work, small), f'rollout.engine="{name}"', "eval.every=0"]
    values += [] if small else ["schedule.updates_per_stage=16"]
    subprocess.run(command(run, values, "--until", "rollout:1"), check=True, cwd=ROOT)
    stages = [stage for stage, _ in itertools.groupby(event["stage"] for event in print_drift(run))]
    assert stages == [0, 1], "an engine was not compared with the actor"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", help='"quickstart", "live" or the name of an engine')
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    if run := {"quickstart": quickstart, "live": live}.get(options.what):
        run(options.work, options.small)
    else:
        engine(options.work, options.small, options.what)


if __name__ == "__main__":
    main()
