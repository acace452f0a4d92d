"""Settings that may change from a stage on."""

import pytest

from megarl.errors import UserError
from megarl.recipe.load import load_recipe
from megarl.storage.run_dir import RunDir
from megarl.storage.run_dir.recipes import from_next_stage, refuse_changes

REWARD = ["reward.require_stop: True -> False"]


@pytest.mark.parametrize(
    ("changes", "stage", "allowed"),
    [
        ((), "001", REWARD),
        (("rollout.token_budget=2", "rollout.oversample=2"), "000", REWARD),
        (("rollout.token_budget=2", "rollout.oversample=2"), "001", []),  # it also trains groups that stage 0 scored
    ],
)
def test_the_reward_stays_for_a_stage_that_trains_scored_groups(recipe, tmp_path, changes, stage, allowed):
    assert from_next_stage(REWARD, tmp_path / "stages" / stage, load_recipe(recipe, changes)) == allowed


def test_settings_of_training_change_until_a_checkpoint_others_until_rollouts(recipe, tmp_path):
    stage = tmp_path / "stages/001"
    training = ["objective.name: 'mu_grpo' -> 'grpo'", "optimizer.lr: 0.1 -> 0.2"]
    scoring = ["rollout.engine: 'builtin' -> 'vllm'", "rollout.vllm.seed: None -> 3", "reward.boxed: False -> True"]
    later, others = ["stages.2.engine: None -> 'vllm'"], ["data.seed: 1 -> 2", "rollout.temperature: 1.0 -> 0.9"]
    of_this = ["stages.1.engine: None -> 'vllm'"]
    wanted = [*training, *scoring, *later, *of_this, *others, "stages.0.engine: None -> 'vllm'"]

    def allowed():
        return from_next_stage(wanted, stage, load_recipe(recipe))

    assert allowed() == [*training, *scoring, *later, *of_this]
    (stage / "rollouts").mkdir(parents=True)
    assert allowed() == [*training, *later]
    (stage / "checkpoints/update_000001").mkdir(parents=True)
    assert allowed() == later


def test_a_run_continues_without_a_setting_that_this_version_does_not_know(recipe, tmp_path):
    run = RunDir.create(tmp_path / "run", load_recipe(recipe))
    path = run.root / "recipe.toml"
    lines = path.read_text().replace("[actor]", "[actor]\nflash = true").splitlines(keepends=True)
    path.write_text("".join(lines))
    with pytest.raises(UserError, match=r"delete its line and the last one, a checksum(?s:.*)actor.flash: unkn"):
        RunDir.open(run.root)
    path.write_text("".join(line for line in lines[:-1] if line != "flash = true\n"))
    assert RunDir.create(run.root, load_recipe(recipe)).recipe == run.recipe


def test_a_refused_change_names_the_commands_that_take_it(recipe, tmp_path):
    """tests/phases/test_changes.py runs both."""
    with pytest.raises(UserError, match="(?s)'grpo' -> 'dapo'.*on the same rollouts: `megarl optimize ") as error:
        refuse_changes(tmp_path / "run", ["objective.name: 'grpo' -> 'dapo'"], load_recipe(recipe))
    assert f"megarl train RECIPE --run-dir NEW --continue-from {tmp_path}/run`" in str(error.value)
