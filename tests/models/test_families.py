"""What a model family refuses, and the names it gives to the tensors of a model."""

import json
from importlib import import_module

import pytest

from megarl.errors import UserError
from megarl.models import FAMILIES
from megarl.models.hf_config import read_hf_config

CONFIG = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=67, rms_norm_eps=1e-6,
)  # fmt: skip
EXPERTS = dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=24)


def read(folder, model_type, **settings):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"model_type": model_type} | settings))
    return read_hf_config(folder)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_is_the_file_of_its_name(model_type):
    assert import_module(f"megarl.models.{model_type}").FAMILY is FAMILIES[model_type]


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported, only False"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not supported, only False"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "'yarn' is not supported; known are default, llama3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' is not supported; known are default, llama3"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}},
            "rope low_freq_factor = 2.0 is not supported, only 1.0",
        ),
    ],
)
def test_what_would_be_computed_otherwise_is_refused(tmp_path, model_type, settings, words):
    read(tmp_path, model_type)
    with pytest.raises(UserError, match=words):
        read(tmp_path, model_type, **settings)


def test_attention_biases_are_a_qwen2s(tmp_path):
    read(tmp_path, "qwen2", attention_bias=True)
    for model_type in set(FAMILIES) - {"qwen2"}:
        with pytest.raises(UserError, match=f"attention_bias = true is not supported for {model_type}"):
            read(tmp_path, model_type, attention_bias=True)


@pytest.mark.parametrize("settings", [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}])
def test_layers_without_experts_are_refused(tmp_path, settings):
    with pytest.raises(UserError, match="mix dense and sparse layers"):
        read(tmp_path, "qwen3_moe", **EXPERTS, **settings)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_tensor_names_are_those_of_transformers(tmp_path, model_type, tied):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = EXPERTS if model_type == "qwen3_moe" else {}
    hf = read(tmp_path, model_type, tie_word_embeddings=tied, **settings)
    config = AutoConfig.for_model(model_type, **CONFIG, tie_word_embeddings=tied, **settings)
    with torch.device("meta"):
        theirs = set(AutoModelForCausalLM.from_config(config).state_dict())
    fused = {name for name in theirs if ".experts." in name}  # transformers has all experts in one tensor
    ours = FAMILIES[model_type].tensor_names(hf)
    experts = {name for name in ours if ".experts." in name}
    assert ours - experts == theirs - fused - ({"lm_head.weight"} if tied else set())
    assert len(experts) == (2 * 3 * 3 if settings else 0)  # layers, experts, matrices
