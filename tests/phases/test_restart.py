"""A phase process that dies is started again by torch elastic; a second `megarl` on the same run is refused."""

import json
import signal
import subprocess
import sys
import time

import psutil

from tests.helpers import ROOT, megarl


def test_dead_workers_are_replaced_and_a_second_parent_is_refused(recipe, tmp_path):
    run = tmp_path / "run"
    settings = ["--set", "run.max_restarts=3", "--set", "schedule.stages=1", "--set", "eval.every=0"]
    command = [sys.executable, "-m", "megarl.cli", "train", str(recipe), "--run-dir", str(run), *settings]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    kill_worker_when(parent, "rollout", lambda: list(run.glob("stages/000/rollouts/*.arrow")))
    second = megarl("train", recipe, "--run-dir", run, *settings)
    assert second.returncode == 2
    assert f'"pid": {parent.pid}' in second.stderr
    kill_worker_when(parent, "optimize", lambda: list(run.glob("stages/000/checkpoints/update_000002")))
    _, errors = parent.communicate(timeout=900)
    assert parent.returncode == 0, errors
    updates = [json.loads(line)["update"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert updates == list(range(1, 7))
    assert (run / "final/model.safetensors").exists()


def test_a_stopped_run_says_how_to_continue(recipe, tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "megarl.cli", "train", str(recipe), "--run-dir", str(run)]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(parent, lambda: list(run.glob("logs/*/attempt_0/rank_0000.log")))
    parent.send_signal(signal.SIGTERM)
    _, errors = parent.communicate(timeout=300)
    assert parent.returncode == 130
    assert "start the same command again" in errors
    assert "Traceback" not in errors
    assert json.loads((run / "events.jsonl").read_text().splitlines()[-1])["event"] == "phase_stopped"


def test_ctrl_c_keeps_the_updates_that_were_made(recipe, tmp_path):
    run = tmp_path / "run"
    settings = ["--set", "schedule.stages=1", "--set", "schedule.updates_per_stage=100", "--set", "eval.every=0"]
    settings += ["--set", "actor.checkpoint_every=1000"]
    command = [sys.executable, "-m", "megarl.cli", "train", str(recipe), "--run-dir", str(run), *settings]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(parent, lambda: len(updates_of(run)) >= 3)
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=300)
    assert parent.returncode == 130
    assert "start the same command again" in errors
    (checkpoint,) = (run / "stages/000/checkpoints").iterdir()
    made = int(checkpoint.name.removeprefix("update_"))
    assert 3 <= made == len(updates_of(run)) < 100
    result = megarl("train", recipe, "--run-dir", run, *settings)
    assert result.returncode == 0, result.stderr
    assert f"continues, skips {made} of 100 updates made earlier" in result.stderr + result.stdout
    assert updates_of(run) == list(range(1, 101))


def updates_of(run):
    metrics = run / "metrics.jsonl"
    return [json.loads(line)["update"] for line in metrics.read_text().splitlines()] if metrics.exists() else []


def wait_for(parent, condition):
    while not condition():
        assert parent.poll() is None, parent.stderr.read()
        time.sleep(0.005)


def kill_worker_when(parent, phase, condition):
    wait_for(parent, condition)
    for child in psutil.Process(parent.pid).children():
        if phase in child.cmdline():
            child.send_signal(signal.SIGKILL)
            return
    raise AssertionError(f"no {phase} process to kill")
