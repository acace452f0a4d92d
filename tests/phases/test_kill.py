"""SIGKILL at twenty moments: the run still finishes, with every update once and the same bytes as undisturbed."""

import json
import random
import time
from pathlib import Path

from safetensors.torch import load_file

from tests.helpers import megarl, start_megarl, wait_until_nobody_works_on


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def stage_moments(stage):
    """Conditions on a run directory that hold in the middle of each kind of work of one stage."""

    def at(pattern, count=1):
        return lambda run: len(list(run.glob(pattern))) >= count

    rollouts, checkpoints = f"stages/{stage:03d}/rollouts", f"stages/{stage:03d}/checkpoints"
    after = "stages/001/policy" if stage == 0 else "final"
    temporary = "stages/001/.policy.*.tmp" if stage == 0 else ".final.*.tmp"
    return {
        f"stage {stage}: evaluation": at(f"logs/{stage:03d}_evaluate/attempt_0/rank_0000.log"),
        f"stage {stage}: first shard": at(f"{rollouts}/*.arrow"),
        f"stage {stage}: ledger": lambda run: lines(run / rollouts / "ledger.jsonl") >= 2,
        f"stage {stage}: last shard, sealing": at(f"{rollouts}/*.arrow", 3),
        f"stage {stage}: sealed": at(f"{rollouts}/SEALED"),
        f"stage {stage}: first update": lambda run: lines(run / "metrics.jsonl") >= 6 * stage + 1,
        f"stage {stage}: first checkpoint under way": at(f"{checkpoints}/.update_000002.*.tmp"),
        f"stage {stage}: between checkpoints": lambda run: lines(run / "metrics.jsonl") >= 6 * stage + 3,
        f"stage {stage}: last checkpoint under way": at(f"{checkpoints}/.update_000006.*.tmp"),
        f"stage {stage}: export": lambda run: bool(list(run.glob(temporary))) or (run / after).exists(),
    }


def kill_when(condition, recipe, run, rng):
    """Start or continue the run and kill it once the condition holds; False when it ended first."""
    command = start_megarl("train", recipe, "--run-dir", run)
    while command.poll() is None:
        if condition(run):
            time.sleep(rng.uniform(0, 0.05))
            command.kill()
            command.wait()
            return True
        time.sleep(0.001)
    assert command.returncode == 0, command.stderr
    return False


def test_killed_runs_end_with_the_same_bytes(recipe, tmp_path):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    result = megarl("train", recipe, "--run-dir", undisturbed)
    assert result.returncode == 0, result.stderr

    rng, kills = random.Random(0), 0
    for stage in (0, 1):
        for name, condition in stage_moments(stage).items():
            assert kill_when(condition, recipe, killed, rng), f"the run ended before: {name}"
            kills += 1
            wait_until_nobody_works_on(killed)
    assert kills == 20
    result = megarl("train", recipe, "--run-dir", killed)
    assert result.returncode == 0, result.stderr

    updates = [json.loads(line)["update"] for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert updates == list(range(1, 13))
    for policy in ("stages/001/policy", "final"):
        assert_same_weights(undisturbed / policy, killed / policy)
    for path in sorted(undisturbed.glob("stages/*/rollouts/*")):
        assert path.read_bytes() == (killed / path.relative_to(undisturbed)).read_bytes(), path.name
    temporary = [p for p in killed.rglob(".*.tmp") if "logs" not in p.parts]
    assert not temporary


def assert_same_weights(one: Path, two: Path):
    a, b = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert a.keys() == b.keys()
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert json.loads((one / "megarl.json").read_text()) == json.loads((two / "megarl.json").read_text())
