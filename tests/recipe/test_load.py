"""Values of legal keys that cannot work are refused, and an infinite one survives writing and reading."""

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
def test_settings_that_cannot_work_with_one_response_per_prompt_are_refused(recipe, settings, words):
    single = ["rollout.responses_per_prompt=1", "objective.advantage=batch_normalised"]
    assert load_recipe(recipe, single).rollout.responses_per_prompt == 1
    with pytest.raises(UserError, match=words):
        load_recipe(recipe, [*single, *settings])


@pytest.mark.parametrize("size", ["1", "0", '"two"'])
def test_fewer_than_two_virtual_stages_are_refused(recipe, size):
    with pytest.raises(UserError, match="leave it out for one"):
        load_recipe(recipe, [f"megatron.virtual_pipeline_model_parallel_size={size}"])


def test_an_infinite_bound_of_the_ratio_survives_writing_and_reading(recipe, tmp_path):
    first = load_recipe(recipe, ["objective.ratio_max=inf"])
    (tmp_path / "again.toml").write_text(dump_recipe(first))
    assert load_recipe(tmp_path / "again.toml") == first
    assert first.objective.fields["ratio_max"] == float("inf")


def test_a_text_where_a_list_is_expected_is_said_in_those_words(recipe):
    with pytest.raises(UserError, match=r"metrics.by: expected a list, in brackets \(got 'level'\)"):
        load_recipe(recipe, ["metrics.by=level"])


def test_what_was_found_is_said_where_it_is_one_value(recipe):
    with pytest.raises(UserError, match=r"  recipe: objective.advantage = .* compares .* must be at least 2$"):
        load_recipe(recipe, ["rollout.responses_per_prompt=1"])
    with pytest.raises(UserError, match=r"optimizer.lr: .* \(got -1.0\)$"):
        load_recipe(recipe, ["optimizer.lr=-1.0"])
