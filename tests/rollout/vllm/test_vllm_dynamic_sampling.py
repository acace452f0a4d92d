"""Dynamic sampling with vLLM: once the groups to train are known, no further group is begun."""

import json
import subprocess
import sys

import pytest

from megarl.recipe.load import load_recipe
from megarl.storage.rollouts import RolloutStore
from megarl.storage.run_dir import RunDir
from tests.helpers import ROOT

pytestmark = pytest.mark.vllm

SETTINGS = {
    "rollout.engine": '"vllm"',
    "rollout.oversample": 40,  # on a busy machine verdicts come late, and more groups have begun by then
    "rollout.groups_per_chunk": 16,
    "rollout.responses_per_prompt": 4,
    "rollout.max_response_tokens": 112,  # an untrained model stops at about one token in 29, so lengths differ widely
    "schedule.stages": 1,
    "schedule.updates_per_stage": 1,
    "schedule.prompts_per_update": 4,
    "reward.correct_above": 0.02,  # an untrained model gets partial credit at most
    "reward.require_stop": "false",
    "eval.every": 0,
}


def test_generation_ends_once_the_groups_to_train_are_known(tiny_model, tmp_path):
    settings = [f'model.path="{tiny_model}"', *[f"{name}={value}" for name, value in SETTINGS.items()]]
    run = RunDir.create(tmp_path / "run", load_recipe(ROOT / "examples/quickstart/recipe.toml", settings))
    command = [sys.executable, "-m", "megarl.cli", "rollout", str(run.root), "--stage", "0"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr

    store = RolloutStore(run.stage(0).rollouts)
    varied = [g.group_id for g in store.read(store.group_ids) if len({r.reward for r in g.responses}) > 1]
    assert store.chosen == varied[:4]
    assert store.group_ids[: store.chosen[-1] + 1] == list(range(store.chosen[-1] + 1)), "no earlier one was skipped"
    assert len(store.group_ids) <= store.group_ids[-1] + 1 < len(run.stage(0).groups) == 160
    assert {r.finish_reason for g in store.read(store.group_ids) for r in g.responses} <= {"stop", "length"}
    (event,) = [e for e in map(json.loads, run.events.read_text().splitlines()) if e["event"] == "dynamic_sampling"]
    assert (event["generated"], event["with_variance"]) == (len(store.group_ids), len(varied))
    assert (event["candidates"], event["chosen"], event["filled"]) == (160, 4, 0)
