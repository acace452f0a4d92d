"""What a live run does not support is refused before any process starts; how many devices it needs."""

import pytest

from megarl.commands.one_phase import branch_recipe, optimize_stage, rollout_stage
from megarl.errors import UserError
from megarl.recipe.load import load_recipe
from megarl.storage.run_dir import RunDir
from megarl.workers.nodes import NodeRank, Nodes
from megarl.workers.preflight import check_recipe

LIVE = ["schedule.kind=live", "schedule.sync_every=2", "schedule.lockstep=true"]


def test_settings_that_need_one_policy_per_stage_are_refused(recipe):
    check_recipe(load_recipe(recipe, LIVE))
    with pytest.raises(UserError, match='routing_replay = "actor".*in a live run.* several policies generate it'):
        check_recipe(load_recipe(recipe, [*LIVE, "actor.routing_replay=actor"]))
    # the proximal policy is a recent one, not that of the stage
    for current in (["objective.name=decoupled_ppo", "objective.proximal_updates=2"], ["objective.icepop={}"]):
        check_recipe(load_recipe(recipe, [*LIVE, *current]))


def test_a_live_run_needs_devices_for_trainers_and_engines(recipe):
    many = ["rollout.workers=3", "actor.processes_per_node=2"]
    assert load_recipe(recipe, many).devices_per_node == 3
    assert load_recipe(recipe, [*many, *LIVE]).devices_per_node == 5
    assert load_recipe(recipe, [*many, *LIVE, "schedule.colocate=true"]).devices_per_node == 3


def test_phases_of_a_live_run_cannot_run_alone(recipe, tmp_path):
    run, nodes = RunDir.create(tmp_path / "run", load_recipe(recipe, LIVE)), Nodes(NodeRank())
    for command in (
        lambda: rollout_stage(nodes, run.stage(0)),
        lambda: optimize_stage(nodes, run.stage(0)),
        lambda: branch_recipe(run.stage(0), []),
    ):
        with pytest.raises(UserError, match="is a live run"):
            command()
