"""A phase whose process dies is restarted; a stopped run keeps its work; a second `megarl` on a run is refused."""

import json
import signal

import pytest

from megarl.storage.run_dir import RunDir
from tests.helpers import (
    events,
    fork_server_of,
    megarl,
    processes_of,
    read_lines,
    start_megarl,
    stop_and_release,
    wait_for,
    wait_until_held,
)


def test_dead_processes_are_restarted_and_a_second_parent_is_refused(recipe, tmp_path):
    run = tmp_path / "run"
    settings = ["--set", "run.max_restarts=3", "--set", "schedule.stages=1", "--set", "eval.every=0"]
    held = tmp_path / "held"
    hold = [r"replace .*\.arrow|open .*/metrics\.jsonl", 3, str(held)]  # of three shards, and of six updates
    parent = start_megarl("train", recipe, "--run-dir", run, *settings, hold=hold)
    for phase in ("rollout", "optimize"):
        wait_until_held(parent, held)
        (worker,) = processes_of(parent.pid, phase)
        second = megarl("train", recipe, "--run-dir", run, *settings)
        assert second.returncode == 2
        assert f'"pid": {parent.pid}' in second.stderr
        if phase == "rollout":
            held.unlink()  # the next phase is held too
        worker.send_signal(signal.SIGKILL)
    assert parent.wait() == 0, parent.stderr
    assert updates_of(run) == list(range(1, 7))
    assert (run / "final/model.safetensors").exists()


def test_a_finished_run_that_is_extended_equals_a_run_of_that_length(recipe, tmp_path):
    def train(run, stages):
        small = (
            f"schedule.stages={stages}",
            "schedule.updates_per_stage=2",
            "schedule.prompts_per_update=2",
            "eval.every=0",
        )
        result = megarl("train", recipe, "--run-dir", run, *(w for s in small for w in ("--set", s)))
        return result.returncode, result.stderr

    longer, once = tmp_path / "longer", tmp_path / "once"
    for run, stages in ((longer, 1), (longer, 2), (once, 2)):
        assert train(run, stages) == (0, "")
    assert updates_of(longer) == list(range(1, 5))
    for policy in ("final", "stages/001/policy"):
        one, other = (run / policy / "model.safetensors" for run in (longer, once))
        assert one.read_bytes() == other.read_bytes()
    (event,) = events(RunDir.open(longer), "recipe_changed")
    assert event["settings"] == ["schedule.stages: 1 -> 2"]
    code, message = train(longer, 1)
    assert code == 2
    assert "schedule.stages: 2 -> 1" in message
    assert megarl("audit", longer).returncode == 0


def test_a_stopped_run_says_how_to_continue(recipe, tmp_path):
    run = tmp_path / "run"
    held = tmp_path / "held"
    parent = start_megarl("train", recipe, "--run-dir", run, hold=[r"replace .*\.arrow", 1, str(held)])
    wait_until_held(parent, held)
    stop_and_release(parent, signal.SIGTERM, held)
    assert parent.wait(300) == 130
    assert "start the same command again" in parent.stderr
    assert "Traceback" not in parent.stderr
    assert json.loads((run / "events.jsonl").read_text().splitlines()[-1])["event"] == "phase_stopped"


def test_ctrl_c_keeps_the_updates_that_were_made(recipe, tmp_path):
    run, held = tmp_path / "run", tmp_path / "held"
    settings = ["--set", "schedule.stages=1", "--set", "schedule.updates_per_stage=10", "--set", "eval.every=0"]
    settings += ["--set", "actor.checkpoint_every=1000"]
    hold = ["open .*/metrics.jsonl", 4, str(held)]
    parent = start_megarl("train", recipe, "--run-dir", run, *settings, hold=hold)
    wait_until_held(parent, held)
    stop_and_release(parent, signal.SIGINT, held)
    assert parent.wait(300) == 130
    assert parent.stderr.index("stopping\n") < parent.stderr.index("start the same command again")
    (checkpoint,) = (run / "stages/000/checkpoints").iterdir()
    made = int(checkpoint.name.removeprefix("update_"))
    assert 3 <= made == len(updates_of(run)) < 10
    result = megarl("train", recipe, "--run-dir", run, *settings)
    assert result.returncode == 0, result.stderr
    assert f"continues, skips {made} of 10 updates made earlier" in result.stderr + result.stdout
    assert updates_of(run) == list(range(1, 11))


@pytest.mark.parametrize("moment", ["first import", "rollout", "optimize"])
def test_a_killed_fork_server_loses_nothing(recipe, tmp_path, moment):
    """Between phases it is replaced; a phase, whose processes die with it, is restarted."""
    run, held = tmp_path / "run", tmp_path / "held"
    settings = ["--set", "run.max_restarts=1", "--set", "schedule.stages=1", "--set", "eval.every=0"]
    held_at = {"first import": "nothing", "rollout": r"replace .*\.arrow", "optimize": "open .*/metrics.jsonl"}
    hold = [held_at[moment], 3, str(held)]
    parent = start_megarl("train", recipe, "--run-dir", run, *settings, hold=hold)
    if moment == "first import":
        wait_for(parent, lambda: fork_server_of(parent.pid))
    else:
        wait_until_held(parent, held)
    fork_server_of(parent.pid).kill()
    assert parent.wait() == 0, parent.stderr
    assert [event["phase"] for event in events(RunDir.open(run), "restart")] == [moment] * (moment != "first import")
    assert updates_of(run) == list(range(1, 7))
    assert (run / "final/model.safetensors").exists()


def updates_of(run):
    return [line["update"] for line in read_lines(run / "metrics.jsonl")]
