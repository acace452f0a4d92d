"""What a live run cannot do is said before any process starts."""

import pytest

from megarl.commands import branch_recipe, optimize_stage, rollout_stage
from megarl.errors import UserError
from megarl.recipe.load import load_recipe
from megarl.storage.run_dir import RunDir
from megarl.workers.nodes import NodeRank, Nodes
from megarl.workers.preflight import check_recipe

LIVE = ["schedule.kind=live", "schedule.sync_every=2", "schedule.lockstep=true"]


def test_what_needs_the_one_policy_of_a_stage(recipe):
    check_recipe(load_recipe(recipe, LIVE))
    with pytest.raises(UserError, match="old_logprobs.*in a live run.* several policies generate it.*staged"):
        check_recipe(load_recipe(recipe, [*LIVE, "objective.icepop={}"]))
    with pytest.raises(UserError, match='routing_replay = "actor".*in a live run.* several policies generate it'):
        check_recipe(load_recipe(recipe, [*LIVE, "actor.routing_replay=actor"]))
    check_recipe(load_recipe(recipe, ["objective.icepop={}"]))
    current = ["objective.name=decoupled_ppo", "objective.proximal_updates=2"]  # its proximal policy is a current one
    check_recipe(load_recipe(recipe, [*LIVE, *current]))


def test_devices_stand_side_by_side(recipe):
    many = ["rollout.workers=3", "actor.processes_per_node=2"]
    assert load_recipe(recipe, many).devices_per_node == 3
    assert load_recipe(recipe, [*many, *LIVE]).devices_per_node == 5
    assert load_recipe(recipe, [*many, *LIVE, "schedule.colocate=true"]).devices_per_node == 3


def test_no_phase_of_a_live_run_stands_alone(recipe, tmp_path):
    run, nodes = RunDir.create(tmp_path / "run", load_recipe(recipe, LIVE)), Nodes(NodeRank())
    for command in (
        lambda: rollout_stage(nodes, run.stage(0)),
        lambda: optimize_stage(nodes, run.stage(0)),
        lambda: branch_recipe(run.stage(0), []),
    ):
        with pytest.raises(UserError, match="is a live run"):
            command()
