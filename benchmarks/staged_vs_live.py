"""The cost of switching between generation and optimisation, and how long trainers wait, in staged and live schedules.

The first run is the quickstart unchanged, on one device: three rollouts, three optimisations and four evaluations.

The others have the quickstart's task, model and budget of updates and samples on two devices (cores), without
evaluations. Staged phases use both devices, for two engines and then two trainers; live runs have one engine and one
trainer.

- staged, S updates per stage, and live lockstep with new weights every 4 updates. Both alternate between generation and
  optimisation; the remaining time is for start, export, load and switch. On a busy machine compare CPU seconds.
- live with max_lag = 4, 16 and 64: the share of the trainer's time in which it waits for rollouts (mu-GRPO, Table 2).

    python benchmarks/staged_vs_live.py [--updates 288] [--stages 1]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import time_command, write_table

SYNC_EVERY = 4


def on_devices(processes: int, **schedule: Any) -> dict[str, Any]:
    """Settings that give the quickstart another schedule, and ``processes`` engines and as many trainers."""
    settings = {f"schedule.{name}": value for name, value in schedule.items()}
    settings |= {"eval.every": 0, "run.tensorboard": False, "rollout.groups_per_chunk": 64}
    return settings | {"rollout.workers": processes, "actor.processes_per_node": processes}


def train(run: Path, settings: dict[str, Any]) -> tuple[float, float]:
    """Run `megarl train` on the quickstart's recipe; returns (wall seconds, CPU seconds)."""
    command = [sys.executable, "-W", "ignore", "-m", "megarl.cli", "train", "examples/quickstart/recipe.toml"]
    command += ["--run-dir", str(run)]
    command += [part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    return time_command(command)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def generation_seconds(events: list[dict[str, Any]]) -> float:
    """Seconds of generation in a staged run, scoring included: the slowest engine of each phase, and evaluations."""
    slowest: dict[int, float] = {}
    for event in events:
        if event["event"] == "rollout_progress":
            slowest[event["stage"]] = max(event["seconds"], slowest.get(event["stage"], 0.0))
    evaluated = sum(event["seconds"] for event in events if event["event"] == "evaluation")
    return sum(slowest.values()) + evaluated


def account(name: str, run: Path, wall: float, cpu: float) -> dict[str, Any]:
    """A row with the parts of a run's wall time, in seconds, and its lags."""
    updates, events = read(run / "metrics.jsonl"), read(run / "events.jsonl")
    idle = {event["role"]: event for event in events if event["event"] == "idle"}
    exports = [e["seconds"] for e in events if e["event"] == "export" and "/policies/" in e["policy"]]
    waited = sum(update.get("idle_seconds", 0.0) for update in updates)
    optimise = sum(update["seconds"] for update in updates) - waited - sum(exports)
    generate = sum(e["generate_seconds"] for e in events if e["event"] == "idle" and e["role"] == "rollout")
    if not idle:
        generate = generation_seconds(events)
    row = {"schedule": name, "updates": len(updates), "cpu_s": cpu, "wall_s": wall}
    row |= {"generate_s": generate, "optimise_s": optimise}
    ages = [update["staleness"] for update in updates]
    row |= {"largest_lag": max(ages), "mean_lag": sum(ages) / len(ages)}
    return row | {"trainer_idle": waited / sum(update["seconds"] for update in updates)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=288, help="updates per stage; the quickstart makes 288 in all")
    parser.add_argument("--stages", type=int, default=1)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    budget = {"stages": options.stages, "updates_per_stage": options.updates}
    live = {"kind": "live", "sync_every": SYNC_EVERY}
    runs: dict[str, dict[str, Any]] = {
        "quickstart, 3 x S = 96": {},
        f"staged, S = {options.updates}": on_devices(2, kind="staged", **budget),
        f"live lockstep, S = {SYNC_EVERY}": on_devices(1, lockstep=True, **live, **budget),
    }
    runs |= {f"live, max_lag = {lag}": on_devices(1, max_lag=lag, **live, **budget) for lag in (4, 16, 64)}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, settings) in enumerate(runs.items()):
            run = Path(scratch) / str(number)
            row = account(name, run, *train(run, settings))
            if number < 3:  # in the others generation and optimisation overlap, so there is no remainder
                row["neither_s"] = row["wall_s"] - row["generate_s"] - row["optimise_s"]
            rows.append(row)
            print(json.dumps(row), flush=True)
    write_table("staged_vs_live", rows)


if __name__ == "__main__":
    main()
