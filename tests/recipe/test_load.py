"""Recipes whose keys are all legal, but which could train nothing."""

import pytest

from megarl.errors import UserError
from megarl.recipe.load import dump_recipe, load_recipe


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["objective.zero_variance=drop"], 'zero_variance = "drop" would drop everything'),
        (["schedule.prompts_per_update=1"], "prompts_per_update must be at least 2"),
    ],
)
def test_groups_of_one(recipe, settings, words):
    single = ["rollout.responses_per_prompt=1", "objective.advantage=batch_normalised"]
    assert load_recipe(recipe, single).rollout.responses_per_prompt == 1
    with pytest.raises(UserError, match=words):
        load_recipe(recipe, [*single, *settings])


@pytest.mark.parametrize("size", ["1", "0", '"two"'])
def test_virtual_stages_are_at_least_two(recipe, size):
    with pytest.raises(UserError, match="leave it out for one"):
        load_recipe(recipe, [f"megatron.virtual_pipeline_model_parallel_size={size}"])


def test_a_ratio_without_an_upper_bound_is_read_written_and_read_again(recipe, tmp_path):
    first = load_recipe(recipe, ["objective.ratio_max=inf"])
    (tmp_path / "again.toml").write_text(dump_recipe(first))
    assert load_recipe(tmp_path / "again.toml") == first
    assert first.objective.fields["ratio_max"] == float("inf")
