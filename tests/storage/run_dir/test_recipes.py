"""Settings that may change from a stage on."""

import pytest

from megarl.recipe.load import load_recipe
from megarl.storage.run_dir.recipes import from_next_stage

REWARD = ["reward.require_stop: True -> False"]


@pytest.mark.parametrize(
    ("settings", "stage", "allowed"),
    [
        ((), "001", REWARD),
        (("rollout.token_budget=2", "rollout.oversample=2"), "000", REWARD),
        (("rollout.token_budget=2", "rollout.oversample=2"), "001", []),  # it also trains groups that stage 0 scored
    ],
)
def test_the_reward_may_not_change_before_a_stage_that_trains_scored_groups(recipe, tmp_path, settings, stage, allowed):
    assert from_next_stage(REWARD, tmp_path / "stages" / stage, load_recipe(recipe, settings)) == allowed
