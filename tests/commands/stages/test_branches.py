"""Stages that depend on earlier stages or on another run: what packs, rescoring and branches do with them."""

import pytest

from megarl.commands.one_phase import branch, changed_recipe
from megarl.commands.stages.pack import pack
from megarl.errors import UserError
from tests.commands.stages.made_up import make_run

BUDGET = ("rollout.token_budget=2", "rollout.oversample=2")


def test_a_stage_with_a_token_budget_is_neither_packed_nor_scored_again(recipe, tmp_path):
    run = make_run(recipe, tmp_path / "run", *BUDGET)
    with pytest.raises(UserError, match="trains groups that earlier stages began"):
        pack(run.root, 0, tmp_path / "stage", "apache-2.0", weights=False, prompts=True)
    assert not (tmp_path / "stage").exists()
    with pytest.raises(UserError, match="--set reward: not with rollout.token_budget"):
        changed_recipe(run.stage(0), ["reward.require_stop=false"])
    assert changed_recipe(run.stage(0), ["optimizer.lr=1e-3"]).optimizer.lr == 1e-3


def test_the_optimizer_state_of_another_run_goes_into_branches(recipe, tmp_path):
    run, checkpoint = make_run(recipe, tmp_path / "run"), tmp_path / "other/update_000002"
    checkpoint.mkdir(parents=True)
    run.start_from(checkpoint)
    made = branch(run.stage(0), tmp_path / "branch", changed_recipe(run.stage(0), ["optimizer.lr=1e-3"]))
    assert made.run.start() == checkpoint
    checkpoint.rmdir()
    with pytest.raises(UserError, match="put it back"):
        made.run.start()
