"""``megarl runs`` lists all runs below a directory, with the state that follows from their files and locks."""

import fcntl
import json
import shutil

from megarl.storage.checked_json import append_json
from megarl.views.runs import list_runs, runs_table
from tests.phases.commands import succeed
from tests.views.synthetic_run import ACCURACY, make_branch, make_run


def states(folder):
    return {line.run: line.state for line in list_runs(folder)}


def test_the_state_of_a_run_follows_from_its_files_and_its_lock(tmp_path):
    for name in ("done", "group/stopped", "group/failed", "working"):
        make_run(tmp_path / name)
    (tmp_path / "done/final").mkdir()
    append_json(tmp_path / "group/failed/events.jsonl", {"time": 0, "event": "phase_failed", "phase": "optimize"})
    with open(tmp_path / "working/.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        expected = {"done": "finished", "group/failed": "failed", "group/stopped": "stopped", "working": "running"}
        assert states(tmp_path) == expected
    append_json(tmp_path / "group/failed/events.jsonl", {"time": 1, "event": "phase_start", "phase": "optimize"})
    assert states(tmp_path) == expected | {"group/failed": "stopped", "working": "stopped"}


def test_a_branch_is_finished_after_its_stage(tmp_path):
    branch = make_branch(tmp_path / "branch", make_run(tmp_path / "run"), 1)
    assert states(tmp_path)["branch"] == "stopped"
    (branch / "stages/002/policy").mkdir(parents=True)
    assert states(tmp_path) == {"branch": "finished", "run": "stopped"}
    assert {line.run: line.updates for line in list_runs(tmp_path)} == {"branch": 192, "run": 288}


def test_the_newest_numbers_of_a_run_are_listed(tmp_path):
    run = make_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[:200]) + "\n")
    (line,) = list_runs(tmp_path)
    last = json.loads(lines[199])
    assert (line.stage, line.update, line.updates) == (2, 200, 288)
    assert (line.accuracy, line.reward) == (ACCURACY[-1], last["reward/mean"])
    table = runs_table([line]).splitlines()
    assert table[1].split() == ["run", "stopped", "3", "200", "/", "288", "0.902", f"{last['reward/mean']:.3f}"]


def test_directories_that_are_no_runs_are_left_out_and_damaged_runs_are_listed(tmp_path):
    make_run(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "run/stages/000/copy")  # a directory inside a run is not listed
    (tmp_path / "recipes").mkdir()
    shutil.copy(tmp_path / "run/recipe.toml", tmp_path / "recipes")
    (make_run(tmp_path / "torn") / "recipe.toml").write_text("[schedule")
    make_run(tmp_path / "\x1b[2Jname")
    found = [json.loads(line) for line in succeed("runs", tmp_path, "--json").stdout.splitlines()]
    assert [(line["run"], line["state"]) for line in found] == [
        ("\x1b[2Jname", "stopped"), ("run", "stopped"), ("torn", "unreadable"),
    ]  # fmt: skip
    assert succeed("runs", tmp_path).stdout.replace("\n", "").isprintable()
    assert succeed("runs", tmp_path / "recipes").stdout == f"there are no runs below {tmp_path / 'recipes'}\n"
    succeed("runs", tmp_path / "gone", code=2)
