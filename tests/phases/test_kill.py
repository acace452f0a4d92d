"""SIGKILL at any moment: the run still finishes, with every update once and the same bytes as without kills.

Runs without kills are compared with a plain loop over their rollouts in `test_compositions`, so that both cannot be
wrong alike.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megarl.storage.rollouts import RolloutStore
from tests.extent import few
from tests.helpers import ROOT, read_lines, wait_until_nobody_works_on
from tests.phases.commands import start_held, train
from tests.storage.sample_rollouts import as_bytes

pytestmark = pytest.mark.crash

TIMES = {"seconds", "tokens_per_second"}  # metrics that differ between two identical runs


def lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def moments(stage):
    """{moment: (pattern of a file operation, which of the matching ones)}, one for each kind of work of a stage."""
    folder, policy = f"stages/{stage:03d}", r"stages/001/\.policy" if stage == 0 else r"/\.final"
    return {
        "start of the rollout phase": (f"open .*logs/{stage:03d}_rollout/attempt_0/rank_0000.log", 1),
        "first shard": (rf"replace .*{folder}/rollouts/.*_{24 * stage:08d}\.arrow", 1),  # of three, 8 groups each
        "ledger": (f"open .*{folder}/rollouts/ledger.jsonl", 3),
        "last shard": (rf"replace .*{folder}/rollouts/.*_{24 * stage + 16:08d}\.arrow", 1),
        "sealing": (f"replace .*{folder}/rollouts/SEALED", 1),
        "start of the optimize phase": (f"open .*logs/{stage:03d}_optimize/attempt_0/rank_0000.log", 1),
        "first update": ("open .*metrics.jsonl", 1),
        "first checkpoint under way": (rf"open .*{folder}/checkpoints/\.update_000002\..*\.tmp/.", 1),
        "between checkpoints": ("open .*metrics.jsonl", 5),
        "last checkpoint under way": (rf"open .*{folder}/checkpoints/\.update_000006\..*\.tmp/.", 1),
        "export": (rf"open .*{policy}\..*\.tmp/.", 1),
    }


def kill_at(pattern, count, recipe, run, *settings):
    """Start or resume the run and kill it at the ``count``-th file operation that matches ``pattern``."""
    kill_command(pattern, count, run, "train", recipe, "--run-dir", run, *settings)


def kill_command(pattern, count, run, *arguments):
    marker = run.with_name("held")
    marker.unlink(missing_ok=True)
    command, _ = start_held(marker, pattern, count, *arguments)
    command.kill()
    command.wait()
    wait_until_nobody_works_on(run)


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory):
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    train(recipe, run)
    return run


def test_killed_runs_end_with_the_same_bytes(undisturbed, recipe, tmp_path):
    killed = tmp_path / "killed"
    first = few(moments(0), "first shard", "sealing", "first update", "first checkpoint under way")
    second = few(moments(1), "ledger", "between checkpoints", "export")
    for stage, name in (*((0, name) for name in first), *((1, name) for name in second)):
        kill_at(*moments(stage)[name], recipe, killed)
    train(recipe, killed)
    assert_same_run(undisturbed, killed)


def test_a_run_started_from_a_shell_ends_with_the_same_bytes_after_a_kill(undisturbed, recipe, tmp_path):
    """Like a user's run it has its own interpreter and fork server; other tests fork both from one process."""
    killed = tmp_path / "killed"
    command = [sys.executable, "-m", "megarl.cli", "train", str(recipe), "--run-dir", str(killed)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while lines(killed / "metrics.jsonl") < 3:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until_nobody_works_on(killed)
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert_same_run(undisturbed, killed)


def evaluations_of(run):
    """(stage, accuracy) of every evaluation event, including repeated ones."""
    events = [event for event in read_lines(run / "events.jsonl") if event["event"] == "evaluation"]
    return [(event["stage"], event["accuracy"]) for event in events]


def assert_same_run(undisturbed, killed):
    assert evaluations_of(killed) == evaluations_of(undisturbed)
    assert metrics_of(killed) == metrics_of(undisturbed)
    for policy in [*undisturbed.glob("stages/*/policy"), undisturbed / "final"]:
        assert_same_weights(policy, killed / policy.relative_to(undisturbed))
    for sealed in undisturbed.glob("stages/*/rollouts/SEALED"):
        assert rollouts_of(sealed.parent) == rollouts_of((killed / sealed.relative_to(undisturbed)).parent)
    assert not [path for path in killed.rglob(".*.tmp") if "logs" not in path.parts]


def rollouts_of(directory):
    """All that a sealed stage holds. Files may differ: where a shard ends depends on time and on who generates what."""
    store = RolloutStore(directory)
    groups = store.read(store.group_ids)
    seal = json.loads((directory / "SEALED").read_text())
    return seal["weights_hash"], [as_bytes(group) for group in groups], [group.row for group in groups]


def metrics_of(run):
    """The metrics of the updates, each of which must occur once, without what depends on time."""
    updates = read_lines(run / "metrics.jsonl")
    assert [update["update"] for update in updates] == list(range(1, len(updates) + 1))
    return [{name: value for name, value in update.items() if name not in TIMES} for update in updates]


def assert_same_weights(one: Path, two: Path):
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert json.loads((one / "megarl.json").read_text()) == json.loads((two / "megarl.json").read_text())
