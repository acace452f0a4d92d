"""Kills whole runs at random moments, as often as asked for: ``python -m tests.faults.kills 1000 0``.

Staged runs (evaluations, rollouts, updates), on one node and on two, and live ones (deterministic, with a delay)
learn from rewards that differ. Each start is held at a random file operation of one of its processes, or runs for a
random time. Then its parent, its fork server, the held process, a rank, a process below a rank (a verifier) or all of
them, on two nodes those of one, are killed, or the parent is asked to stop. After some such starts the run finishes
undisturbed. It must then have every update and evaluation exactly once, and the same bytes as a run that was never
disturbed. A start that does not end within `PATIENCE_SECONDS` counts as hanging.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from megarl.phases.preload import SERVER_NAME
from tests.helpers import free_ports, read_lines, start_megarl, wait_until_nobody_works_on, write_laboratory
from tests.phases.commands import settings
from tests.phases.test_kill import TIMES, assert_same_run, evaluations_of
from tests.zygote import Command

PATIENCE_SECONDS = 600.0
ORPHAN_SECONDS = 10.0  # after the command has ended, no process works on the run any more
SECONDS = 6.0  # mean time after which a start is killed if it is not held before
STARTS = 30  # at most this many starts of a run are disturbed
STAGED = ("schedule.stages=3",)
LIVE = ("schedule.kind=live", "schedule.delay=1", "schedule.sync_every=2", "schedule.stages=3", "eval.every=2")
KINDS = {"staged": STAGED, "live": LIVE, "two nodes": STAGED}
# name: (pattern of the file operations that may be held, how many of them a start has at most)
OPERATIONS = {
    "any file": ("(open|replace) .*/run/", 60),
    "logs": ("open .*/run/logs/", 4),
    "rollouts": ("(open|replace) .*/rollouts/", 8),
    "metrics": ("open .*/metrics.jsonl", 6),
    "checkpoint": (r"(open|replace) .*/checkpoints/", 10),
    "writer of a checkpoint": (r"open .*/checkpoints/\.update_.*\.tmp/__0_", 2),
    "policy": (r"(open|replace) .*/(\.?policy|policies|\.final)", 6),
}


class Run:
    """A run whose starts can be disturbed."""

    def __init__(self, kind: str, recipe: Path, folder: Path) -> None:
        self.kind, self.directory, self.port = kind, folder / "run", free_ports(2)[0]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        wanted = settings(*KINDS[kind], "run.stall_seconds=300")
        self.arguments = ["train", recipe, "--run-dir", self.directory, *wanted]

    def disturb(self, rng: random.Random, held: Path) -> str | None:
        """Start the run and kill or stop it: the phase and what was done, or None if it ended before that."""
        hold, end = None, time.monotonic() + rng.expovariate(1 / SECONDS)
        if rng.random() < 0.7:
            pattern, most = OPERATIONS[rng.choice(list(OPERATIONS))]
            hold = [pattern, rng.randint(1, most), str(held)]
        held.unlink(missing_ok=True)
        begun = self.begun()
        agents = self.start(*settings(f"run.max_restarts={0 if hold else rng.randint(0, 1)}"), hold=hold)
        while not (any_ended(agents) or (reached := held.exists() and held.read_text())):
            if time.monotonic() > end:
                break
        victims: Victims = []
        if not any_ended(agents):
            command = rng.choice(agents)
            with contextlib.suppress(psutil.NoSuchProcess):  # the process has just ended
                if reached:
                    above = psutil.Process(int(reached)).parents()
                    command = next((one for one in agents if one.pid in [p.pid for p in above]), command)
                victims = victims_of(command.pid, int(reached or 0), hold is None)
        if not victims:
            return None
        phase = ["start", *self.begun()][-1]
        name, processes, number = rng.choice(victims)
        held.unlink(missing_ok=True)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(agent.poll(0.05) is None for agent in agents) and time.monotonic() < deadline:
            # now the parent is held too, since each process counts its operations by itself: it would wait for ever;
            # an agent that was killed before it had joined is waited for, unless Slurm ends the others
            if held.exists() or (any_ended(agents) and self.begun() == begun):
                kill(agents)
        for agent in agents:
            agent.wait(0.0)
        wait_until_nobody_works_on(self.directory, ORPHAN_SECONDS)
        return f"{phase}: {name}"

    def start(self, *others: str, hold: list[Any] | None = None) -> list[Command]:
        """The command on each node."""
        if self.kind != "two nodes":
            return [start_megarl(*self.arguments, *others, hold=hold)]
        shared = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        of_nodes = [{**os.environ, **shared, "NODE_RANK": str(rank)} for rank in (0, 1)]
        return [start_megarl(*self.arguments, *others, env=environment, hold=hold) for environment in of_nodes]

    def begun(self) -> list[str]:
        """The phases that events.jsonl has begun."""
        with contextlib.suppress(OSError, ValueError):
            return [e["phase"] for e in read_lines(self.directory / "events.jsonl") if e["event"] == "phase_start"]
        return []

    def finish(self) -> None:
        agents = self.start()
        try:
            for agent in agents:
                assert agent.wait(PATIENCE_SECONDS) == 0, agent.stderr
        finally:
            kill(agents)

    def compare(self, whole: Path) -> None:
        """Raise AssertionError if anything differs from the undisturbed run ``whole``."""
        assert evaluations_of(self.directory) == evaluations_of(whole), evaluations_of(self.directory)
        (assert_same_live_run if self.kind == "live" else assert_same_run)(whole, self.directory)


def kill(agents: list[Command]) -> None:
    for agent in agents:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            agent.kill()


def any_ended(agents: list[Command]) -> bool:
    return any(agent.poll(0.002) is not None for agent in agents)


def assert_same_live_run(whole: Path, run: Path) -> None:
    """Raise AssertionError unless two live runs have the same metrics, weights and rollouts.

    Times may differ, and so may `reference.json`, the text for checking engines: which earlier policy it compares with
    depends on how long processes waited for each other.
    """
    updates = [
        [{name: value for name, value in line.items() if name not in TIMES | {"idle_seconds"}} for line in lines]
        for lines in (read_lines(whole / "metrics.jsonl"), read_lines(run / "metrics.jsonl"))
    ]
    assert updates[0] == updates[1], "metrics differ"
    weights = [path / "model.safetensors" for path in (*whole.glob("stages/*/policy"), whole / "final")]
    for path in sorted([*weights, *whole.glob("stages/*/rollouts/*")]):
        assert path.read_bytes() == (run / path.relative_to(whole)).read_bytes(), path.name
    left = [path for path in run.rglob(".*.tmp") if "logs" not in path.parts]
    assert not left, left


Victims = list[tuple[str, list[psutil.Process], int]]


def victims_of(parent: int, held: int, goes_on: bool) -> Victims:
    """The possible victims in a start. If a process is held, killing any of them ends the start.

    held: the id of the process, or 0. goes_on: none can be held later, so the start can continue without one.
    """
    own = psutil.Process(parent)
    everyone = own.children(recursive=True)
    below = held in [process.pid for process in everyone]
    victims: Victims = [("parent", [own], signal.SIGKILL), ("all", [own, *everyone], signal.SIGKILL)]
    if goes_on:
        victims += [(f"parent asked by {signal.Signals(n).name}", [own], n) for n in (signal.SIGTERM, signal.SIGINT)]
    for process in everyone:
        with contextlib.suppress(psutil.NoSuchProcess):
            name = process.name()
            if process.pid == held:
                victims += [(f"{name} at a file", [process], signal.SIGKILL)] * 3
            elif goes_on or (below and name == SERVER_NAME):
                victims.append((name, [process], signal.SIGKILL))
    return victims


def kill_runs(folder: Path, count: int, seed: int) -> int:
    """Kill runs ``count`` times, each run several times; returns how many runs were wrong in the end."""
    recipe, rng, kills, wrong = write_laboratory(folder), random.Random(seed), 0, 0
    for kind in KINDS:
        whole = Run(kind, recipe, folder / kind)
        whole.finish()
        gradients = [update["grad_norm"] for update in read_lines(whole.directory / "metrics.jsonl")]
        assert sum(norm > 0.01 for norm in gradients) >= 10, gradients
    for number, kind in enumerate(itertools.cycle(KINDS)):
        if kills >= count or wrong > 10:
            break
        run, done = Run(kind, recipe, folder / "disturbed"), []
        try:
            for _ in range(min(count - kills, rng.randint(2, STARTS))):
                if (what := run.disturb(rng, folder / "held")) is None:
                    break
                done.append(what)
            run.finish()
            run.compare(folder / kind / "run")
        except (AssertionError, OSError, ValueError, subprocess.TimeoutExpired) as error:
            wrong += 1
            kept = Path(tempfile.mkdtemp(prefix=f"megarl-wrong-{seed}-{number}-"))  # for inspection
            shutil.copytree(run.directory, kept / "run")
            print(f"WRONG run {number} ({kind}), kept in {kept}: {error!r}"[:2000], flush=True)
        kills += len(done)
        print(f"run {number} ({kind}): {len(done)} kills, {kills} in all: {'; '.join(done)}", flush=True)
    print(f"{kills} kills, {wrong} runs wrong")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=1000)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    options = parser.parse_args()
    os.environ.setdefault("MEGARL_SHUTDOWN_SECONDS", "30")
    with tempfile.TemporaryDirectory(prefix="megarl-kills-") as folder:
        sys.exit(kill_runs(Path(folder), options.count, options.seed) > 0)


if __name__ == "__main__":
    main()
