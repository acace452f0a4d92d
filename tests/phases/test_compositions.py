"""Runs with what a recipe may combine make the updates of a plain loop over their rollouts, byte for byte."""

import json

import numpy as np
import pytest

from megarl.storage.run_dir import RunDir
from tests.actor.ranks import run_ranks
from tests.extent import few
from tests.helpers import ROOT, metrics
from tests.phases import plain_loop
from tests.phases.commands import settings, train
from tests.phases.mutants import recorded_experts
from tools.compositions_page import PARTS, SCHEDULES, SYNC_EVERY, merged


def cells():
    """{name: (schedule, part)} of the cells with a yes of the second table of docs/compositions.md."""
    lines = (ROOT / "docs/compositions.md").read_text().partition("## Schedule")[2].partition("##")[0].splitlines()
    (_, *parts), _, *rows = [line.strip("| ").split(" | ") for line in lines if line]
    pairs = [(name, zip(parts, row, strict=True)) for names, *row in rows for name in names.split("; ")]
    return {f"{name}: {part}": (name, part) for name, row in pairs for part, cell in row if cell == "yes"}


CELLS = cells()
FEW = ("staged, `token_budget`: `passes`", "`delay`: TIS", '`max_lag`, `partial`: `routing_replay = "engine"`')
SHAPES = {"staged": {"stages": 2, "updates_per_stage": 4}, "live": {"stages": 1, "updates_per_stage": 12}}
# about half of the responses are longer than the token budget, and policies differ soon
COMMON = {
    "rollout": {"temperature": 2.0, "groups_per_chunk": 2, "responses_per_prompt": 12},
    "reward": {"require_stop": False},
    "schedule": {"prompts_per_update": 2},
    "optimizer": {"lr": 1e-2},
    "actor": {"checkpoint_every": SYNC_EVERY},
    "eval": {"every": 0},
}


@pytest.fixture(scope="module")
def finals():
    """{schedule: {part: final weights}}, of schedules that always give the same rollouts."""
    return {}


def options(schedule, part):
    tables = merged(COMMON, SCHEDULES[schedule], PARTS[part])
    tables["schedule"] |= SHAPES[tables["schedule"].get("kind", "staged")]
    values = [(f"{name}.{key}", value) for name, table in tables.items() for key, value in table.items()]
    return settings(*(f"{key}={json.dumps(value, separators=(',', '='))}" for key, value in values))  # inline tables


@pytest.mark.parametrize("cell", few(CELLS, *FEW))
def test_a_run_equals_a_plain_loop_over_its_rollouts(cell, recipe, tmp_path, finals):
    schedule, part = CELLS[cell]
    engine = "an_engine_records_experts_and_rests_until_it_is_interrupted"
    train(recipe, tmp_path / "run", *options(schedule, part), mutant=engine)
    run, copies, weights = RunDir.open(tmp_path / "run"), tmp_path / "copies", "model.safetensors"
    run_ranks(plain_loop.train, (run.root, tmp_path / "loop", copies), 1)
    final = (run.final / weights).read_bytes()
    assert final == (tmp_path / "loop" / weights).read_bytes()
    norms = [update["grad_norm"] for update in metrics(run)]
    assert sum(norm > 0.01 for norm in norms) >= 4, norms
    check_generation(run, copies)
    if "max_lag" not in schedule:
        assert final not in finals.setdefault(schedule, {}).values(), "the part changed nothing"
        finals[schedule][part] = final


def check_generation(run, copies):
    """Every token has the log-prob and the experts of its own policy, which is one that the schedule allows."""
    schedule, mixed = run.recipe.schedule, 0
    per_version = SYNC_EVERY // schedule.passes * schedule.prompts_per_update
    for place, group in enumerate(plain_loop.groups_to_train(run)):
        newest, batch = place // per_version * SYNC_EVERY, place // schedule.prompts_per_update
        for response in group.responses:
            versions = response.versions
            mixed += len(np.unique(versions)) > 1
            if schedule.max_lag or run.recipe.rollout.token_budget:
                assert (np.diff(versions) >= 0).all() and versions[-1] <= newest
                assert schedule.max_lag is None or batch - versions[0] <= schedule.max_lag
            else:
                assert set(versions) == {max(0, newest - schedule.delay * SYNC_EVERY)}
            for version in np.unique(versions):
                mine = versions == version
                under = plain_loop.logprobs_under(
                    copies / f"{version:06d}", group, response, run.recipe.rollout.temperature
                )
                np.testing.assert_allclose(response.rollout_logprobs[mine], under[mine], rtol=0, atol=1e-4)
            if run.recipe.actor.trains_recorded_experts:
                of_rows = np.concatenate([versions[:1].repeat(len(group.prompt_tokens)), versions[1:]])
                np.testing.assert_array_equal(response.routed_experts, recorded_experts(of_rows))
    assert bool(mixed) == (schedule.partial or run.recipe.rollout.token_budget is not None)
