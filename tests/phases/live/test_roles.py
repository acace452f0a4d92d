"""Which processes of a live run are trainers or rollout workers, which devices they need, and what is refused."""

import itertools
import os

import pytest

from megarl.commands.one_phase import branch_recipe, optimize_stage, rollout_stage
from megarl.errors import UserError
from megarl.phases.live.service import leave_trainers_devices
from megarl.phases.live.trainer import find_role
from megarl.recipe.load import load_recipe
from megarl.storage.run_dir import RunDir
from megarl.workers.nodes import NodeRank, Nodes

LIVE = ["schedule.kind=live", "schedule.sync_every=2", "schedule.lockstep=true"]
MANY = ["actor.processes_per_node=2", "rollout.workers=3"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_every_node_has_both_roles(recipe, tmp_path, monkeypatch, nodes):
    stage = RunDir(tmp_path, load_recipe(recipe, [*LIVE, *MANY])).stage(0)
    places = {"trainer": [], "worker": []}
    for node, local in itertools.product(range(nodes), range(5)):
        for name, value in {"LOCAL_RANK": local, "GROUP_RANK": node, "GROUP_WORLD_SIZE": nodes}.items():
            monkeypatch.setenv(name, str(value))
        role, workers = find_role(stage)
        assert workers == 3 * nodes
        assert role.name == ("trainer" if local < 2 else "worker")
        assert role.size == {"trainer": 2, "worker": 3}[role.name] * nodes
        places[role.name].append(role.rank)
    # ranks are numbered node by node, so that those that communicate most share a node
    assert places == {"trainer": list(range(2 * nodes)), "worker": list(range(3 * nodes))}


@pytest.mark.parametrize(
    ("visible", "settings", "expected"),
    [
        (None, ["rollout.tensor_parallel=2"], ("1", "2,3,4,5,6,7")),
        ("4,5,6,7,8", [], ("1", "6,7,8")),
        ("4,5,6,7,8", ["schedule.colocate=true"], ("1", "4,5,6,7,8")),
    ],
)
def test_engines_see_the_gpus_that_trainers_leave(recipe, tmp_path, monkeypatch, visible, settings, expected):
    loaded = load_recipe(recipe, [*LIVE, *MANY, "actor.backend=cuda", *settings])
    environment = {"LOCAL_RANK": "3"} | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {})  # the second engine
    monkeypatch.setattr(os, "environ", environment)
    leave_trainers_devices(RunDir(tmp_path, loaded).stage(0))
    assert (environment["LOCAL_RANK"], environment["CUDA_VISIBLE_DEVICES"]) == expected


def test_phases_of_a_live_run_cannot_run_alone(recipe, tmp_path):
    run, nodes = RunDir.create(tmp_path / "run", load_recipe(recipe, LIVE)), Nodes(NodeRank())
    for command in (
        lambda: rollout_stage(nodes, run.stage(0)),
        lambda: optimize_stage(nodes, run.stage(0)),
        lambda: branch_recipe(run.stage(0), []),
    ):
        with pytest.raises(UserError, match="is a live run"):
            command()
