"""Settings of config.json that no model has are one line before anything is made of them."""

import json
import os

import pytest

from megarl.errors import UserError
from megarl.models.hf_config import read_hf_config
from megarl.recipe.load import load_recipe


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": ["qwen3_moe"]}, "model_type .* is not supported"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers = '1000000', expected an integer from 1 to 10,000"),
        ({"head_dim": -8}, "head_dim = '-8'"),
        ({"vocab_size": "many"}, "vocab_size = 'many'"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "num_key_value_heads = 2 does not divide .* = 3"),
        ({"num_experts_per_tok": 10**4}, "num_experts_per_tok is more than the number of experts"),
    ],
)
def test_counts_that_no_model_has_are_refused(tiny_model, tmp_path, change, message):
    settings = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | change))
    with pytest.raises(UserError, match=message) as refused:
        read_hf_config(tmp_path)
    assert "\n" not in str(refused.value)


def test_a_model_path_that_is_a_loop_of_links_is_refused(recipe, tmp_path):
    os.symlink(tmp_path / "b", tmp_path / "a")
    os.symlink(tmp_path / "a", tmp_path / "b")
    with pytest.raises(UserError, match="cannot read .*config.json: Too many levels of symbolic links"):
        read_hf_config(load_recipe(recipe, [f"model.path='{tmp_path}/a'"]).model.path)


def test_a_temperature_that_overflows_is_refused(recipe):
    for setting in ("rollout.temperature=1e-320", "eval.temperature=1e-320"):
        with pytest.raises(UserError, match=r"temperature: Input should be greater than or equal to 0.0001"):
            load_recipe(recipe, [setting])
