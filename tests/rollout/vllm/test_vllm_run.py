"""The quickstart recipe, shortened to seconds, with vLLM in every stage; in the first a replica is killed."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from safetensors.torch import load_file

from megarl.storage.ledger import parse
from megarl.storage.rollouts import RolloutStore
from tests.helpers import ROOT

pytestmark = pytest.mark.vllm

UPDATES = 4
GROUPS = {stage: range(32 * stage, 32 * (stage + 1)) for stage in range(2)}
SETTINGS = {
    "rollout.engine": "vllm",
    "rollout.groups_per_chunk": 4,
    "rollout.max_response_tokens": 64,
    "stages.0.workers": 2,
    "schedule.stages": len(GROUPS),
    "schedule.updates_per_stage": UPDATES,
    "schedule.prompts_per_update": 8,
    "reward.correct_above": 0.02,  # an untrained model gets partial credit at most
    "reward.require_stop": "false",
    "optimizer.lr": 1e-3,
    "optimizer.warmup_updates": 1,
    "eval.every": 0,
    "run.max_restarts": 1,
    "run.tensorboard": "false",
}


@pytest.fixture(scope="module")
def run(tiny_model, tmp_path_factory):
    """(directory, ledger entries when a replica was killed, output) of a finished run of two stages.

    The replica was killed in the first stage, as soon as a group was stored.
    """
    folder = tmp_path_factory.mktemp("vllm_run")
    command = [sys.executable, "-m", "megarl.cli", "train", "examples/quickstart/recipe.toml"]
    command += ["--run-dir", str(folder / "run"), "--set", f'model.path="{tiny_model}"']
    command += [part for name, value in SETTINGS.items() for part in ("--set", f"{name}={value}")]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    rollouts = folder / "run/stages/000/rollouts"
    while not any(b"\n" in ledger.read_bytes() for ledger in rollouts.glob("ledger*.jsonl")):
        assert parent.poll() is None, parent.stdout.read()
        time.sleep(0.01)
    victim = next(p for p in psutil.Process(parent.pid).children() if "rollout" in p.cmdline())
    os.kill(victim.pid, signal.SIGKILL)
    victim.wait()
    stored = [entry for ledger in rollouts.glob("ledger*.jsonl") for entry in parse(ledger)[0]]
    output, _ = parent.communicate(timeout=1800)
    assert parent.returncode == 0, output
    return folder / "run", stored, output


def events(run, kind):
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == kind]


def test_only_unfinished_groups_are_generated_again_after_a_replica_died(run):
    run, stored, _ = run
    (restart,) = events(run, "restart")
    assert (restart["phase"], restart["stage"]) == ("rollout", 0) and "signal 9" in restart["cause"]
    final = RolloutStore(run / "stages/000/rollouts")
    assert final.group_ids == list(GROUPS[0])
    assert stored
    assert {entry.shard: entry for entry in stored}.items() <= {entry.shard: entry for entry in final.entries}.items()
    (resumed,) = events(run, "resume")
    assert resumed["skipped"] >= sum(len(entry.groups) for entry in stored)


def test_no_stage_shows_drift(run):
    run, *_ = run
    drifts = events(run, "weight_drift")
    assert sorted((d["stage"], d["rank"]) for d in drifts) == [(0, 0), (0, 0), (0, 1), (0, 1), (1, 0)]
    for drift in drifts:
        assert drift["precision"] == "float32" and drift["tokens"] > 100
        assert 0 < drift["mean"] <= drift["max"] < 1e-4
    weights = [load_file(run / f"stages/{stage:03d}/policy/model.safetensors") for stage in GROUPS]
    assert any((tensor - weights[1][name]).abs().max() > 1e-3 for name, tensor in weights[0].items())


def test_the_actor_reproduces_the_log_probs_that_vllm_stored(run):
    run, *_ = run
    updates = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [update["update"] for update in updates] == list(range(1, len(GROUPS) * UPDATES + 1))
    for update in updates:
        if update["staleness"] == 0:  # the weights are the same: the log-ratio is the difference of two implementations
            assert 0 < update["m2/all"] < 1e-4**2
        else:
            assert update["m2/all"] > 1e-4**2 and update["grad_norm"] > 0
    assert (run / "final/model.safetensors").exists()


def test_responses_are_complete_and_those_of_a_group_are_not_all_equal(run):
    run, *_ = run
    for stage, expected in GROUPS.items():
        store = RolloutStore(run / f"stages/{stage:03d}/rollouts")
        for group in store.read(list(expected)):
            assert len(group.responses) == 8
            assert len({tuple(response.tokens) for response in group.responses}) > 1
            for response in group.responses:
                ended = response.tokens[-1] == 1
                assert response.finish_reason == ("stop" if ended else "length")
                assert ended or len(response.tokens) == 64
                assert response.policy_version == UPDATES * stage


def test_the_progress_of_a_rollout_phase_is_reported(run):
    run, _, output = run
    progress = [event for event in events(run, "rollout_progress") if event["stage"] == 1]
    last = progress[-1]
    assert (last["groups"], last["responses"], last["decoding"]) == (32, 256, 0)
    store = RolloutStore(run / "stages/001/rollouts")
    responses = [response for group in store.read(list(GROUPS[1])) for response in group.responses]
    assert last["tokens"] == sum(len(response.tokens) for response in responses)
    assert last["truncated"] == sum(response.finish_reason == "length" for response in responses)
    assert last["longest"] == 64 and last["tokens_per_second"] > 0
    assert last["reward_sum"] == sum(response.reward for response in responses)
    assert sum(last["solve_rates"]) == 32
    assert "stage 1/2 rollout restarts" in output
