"""Recipes that are legal key by key, but could train nothing, or another model than they name."""

import json

import pytest

from megarl.errors import UserError
from megarl.models.hf_config import read_hf_config
from megarl.recipe.load import load_recipe


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


@pytest.mark.parametrize("scaling", [{"type": "yarn", "factor": 4.0}, {"rope_type": "linear", "factor": 2.0}])
def test_rope_scaling_that_the_actor_lacks_is_refused_under_either_name(tiny_model, tmp_path, scaling):
    config = json.loads((tiny_model / "config.json").read_text())
    config.pop("rope_parameters", None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_theta": 1e4, "rope_scaling": scaling}))
    with pytest.raises(UserError, match="is not supported; known are default, llama3"):
        read_hf_config(tmp_path)
