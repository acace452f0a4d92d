"""SIGKILL at 22 moments: the run still finishes, with every update once and the same bytes as undisturbed.

The run is held at a moment, by its own file operations, until it is killed: see `hold` in tests/zygote.py.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from safetensors.torch import load_file

from tests.helpers import ROOT, megarl, start_megarl, wait_for, wait_until_nobody_works_on


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def moments(stage):
    """(pattern of a file operation, how many of them in one attempt) in the middle of each kind of work of a stage."""
    folder, policy = f"stages/{stage:03d}", r"stages/001/\.policy" if stage == 0 else r"/\.final"
    return {
        "evaluation": (f"open .*logs/{stage:03d}_evaluate/attempt_0/rank_0000.log", 1),
        "first shard": (rf"replace .*{folder}/rollouts/.*_{24 * stage:08d}\.arrow", 1),  # of three, 8 groups each
        "ledger": (f"open .*{folder}/rollouts/ledger.jsonl", 3),
        "last shard": (rf"replace .*{folder}/rollouts/.*_{24 * stage + 16:08d}\.arrow", 1),
        "sealing": (f"replace .*{folder}/rollouts/SEALED", 1),
        "sealed": (f"open .*logs/{stage:03d}_optimize/attempt_0/rank_0000.log", 1),
        "first update": ("open .*metrics.jsonl", 1),
        "first checkpoint under way": (rf"open .*{folder}/checkpoints/\.update_000002\..*\.tmp/.", 1),
        "between checkpoints": ("open .*metrics.jsonl", 5),
        "last checkpoint under way": (rf"open .*{folder}/checkpoints/\.update_000006\..*\.tmp/.", 1),
        "export": (rf"open .*{policy}\..*\.tmp/.", 1),
    }


def kill_at(pattern, count, recipe, run):
    """Start or continue the run, hold it at a moment and kill it."""
    held = run.with_name("held")
    held.unlink(missing_ok=True)
    command = start_megarl("train", recipe, "--run-dir", run, hold=[pattern, count, str(held)])
    wait_for(command, held.exists)
    command.kill()
    command.wait()
    wait_until_nobody_works_on(run)


def test_killed_runs_end_with_the_same_bytes(recipe, tmp_path):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    result = megarl("train", recipe, "--run-dir", undisturbed)
    assert result.returncode == 0, result.stderr

    kills = [moment for stage in (0, 1) for moment in moments(stage).values()]
    assert len(kills) == 22
    for pattern, count in kills:
        kill_at(pattern, count, recipe, killed)
    result = megarl("train", recipe, "--run-dir", killed)
    assert result.returncode == 0, result.stderr
    assert_same_run(undisturbed, killed)


def test_a_run_that_was_started_from_a_shell_is_killed_three_times(recipe, tmp_path):
    """With interpreters and warm processes of their own, as users start them."""
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    assert megarl("train", recipe, "--run-dir", undisturbed).returncode == 0
    command = [sys.executable, "-m", "megarl.cli", "train", str(recipe), "--run-dir", str(killed)]
    for reached in (
        lambda: list(killed.glob("stages/000/rollouts/*.arrow")),
        lambda: lines(killed / "metrics.jsonl") >= 3,
        lambda: (killed / "stages/001/policy").exists(),
    ):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not reached():
            assert process.poll() is None
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_until_nobody_works_on(killed)
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert_same_run(undisturbed, killed)


def assert_same_run(undisturbed, killed):
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
