"""A phase whose process dies is restarted; a stopped run keeps its work; a second `megarl` on a run is refused."""

import signal

import pytest

from megarl.storage.run_dir import RunDir
from tests.helpers import events, fork_server_of, metrics, processes_of, start_megarl, stop_and_release, wait_until_held
from tests.phases.commands import settings, start_held, succeed, train


def updates_of(run):
    return [line["update"] for line in metrics(RunDir.open(run))]


@pytest.mark.parametrize("victim", ["rank", "fork server"])
def test_dead_processes_are_restarted_and_a_second_parent_is_refused(recipe, tmp_path, victim):
    """The processes of a phase die with the fork server, which is replaced."""
    run, marker = tmp_path / "run", tmp_path / "held"
    arguments = ["train", recipe, "--run-dir", run]
    arguments += settings("run.max_restarts=3", "schedule.stages=1", "eval.every=0")
    hold = [r"replace .*\.arrow|open .*/metrics\.jsonl", 3, str(marker)]  # of three shards, and of six updates
    parent = start_megarl(*arguments, hold=hold)
    for phase in ("rollout", "optimize"):
        wait_until_held(parent, marker)
        (rank,) = processes_of(parent.pid, phase)
        assert f'"pid": {parent.pid}' in succeed(*arguments, code=2).stderr
        if phase == "rollout":
            marker.unlink()  # the next phase is held too
        (rank if victim == "rank" else fork_server_of(parent.pid)).kill()
    assert parent.wait() == 0, parent.stderr
    assert [event["phase"] for event in events(RunDir.open(run), "restart")] == ["rollout", "optimize"]
    assert updates_of(run) == list(range(1, 7))
    assert (run / "final/model.safetensors").exists()


def test_a_finished_run_that_is_extended_equals_a_run_of_that_length(recipe, tmp_path):
    def small(stages):
        batches = ("schedule.updates_per_stage=2", "schedule.prompts_per_update=2")
        return settings(f"schedule.stages={stages}", *batches, "eval.every=0")

    longer, once = tmp_path / "longer", tmp_path / "once"
    for run, stages in ((longer, 1), (longer, 2), (once, 2)):
        assert train(recipe, run, *small(stages)).stderr == ""
    assert updates_of(longer) == list(range(1, 5))
    for policy in ("final", "stages/001/policy"):
        one, other = (run / policy / "model.safetensors" for run in (longer, once))
        assert one.read_bytes() == other.read_bytes()
    (event,) = events(RunDir.open(longer), "recipe_changed")
    assert event["settings"] == ["schedule.stages: 1 -> 2"]
    assert "schedule.stages: 2 -> 1" in train(recipe, longer, *small(1), code=2).stderr
    succeed("audit", longer)


def test_a_stopped_run_says_how_to_continue_and_keeps_its_updates(recipe, tmp_path):
    run, marker = tmp_path / "run", tmp_path / "held"
    small = ("schedule.stages=1", "schedule.updates_per_stage=10", "eval.every=0", "actor.checkpoint_every=1000")
    arguments = ["train", recipe, "--run-dir", run, *settings(*small)]
    for number, *operation in ((signal.SIGTERM, r"replace .*\.arrow", 1), (signal.SIGINT, "open .*/metrics.jsonl", 4)):
        marker.unlink(missing_ok=True)
        parent, _ = start_held(marker, *operation, *arguments)
        stop_and_release(parent, number, marker)
        assert parent.wait(300) == 130
        assert parent.stderr.index("stopping\n") < parent.stderr.index("start the same command again")
        assert "Traceback" not in parent.stderr
        assert len(events(RunDir.open(run), "phase_stopped")) == 1 + (number == signal.SIGINT)
    (checkpoint,) = (run / "stages/000/checkpoints").iterdir()
    made = int(checkpoint.name.removeprefix("update_"))
    assert 3 <= made == len(updates_of(run)) < 10
    told = succeed(*arguments)
    assert f"continues, skips {made} of 10 updates made earlier" in told.stderr + told.stdout
    assert updates_of(run) == list(range(1, 11))
