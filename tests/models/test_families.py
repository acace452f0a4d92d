"""Model families: the settings that they refuse, their defaults, and the names of their tensors."""

import json
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from megarl.data.tokenizer import end_of_sequence
from megarl.errors import UserError
from megarl.models import FAMILIES, families, families_of
from megarl.models.hf_config import read_hf_config
from megarl.recipe.layout import Layout
from tests.actor.conftest import FAMILIES as MODELS
from tests.actor.conftest import auto_model, config_settings, read_settings
from tests.helpers import ROOT


def test_no_file_but_its_own_names_a_family():
    named = re.compile(r'"({0})"|families\.({0})\b'.format("|".join(FAMILIES)))
    assert [path for path in (ROOT / "megarl").rglob("*.py") if named.search(path.read_text())] == []


def test_a_new_file_is_a_new_family(tmp_path, monkeypatch):
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    text = Path(import_module("megarl.models.families.qwen2_moe").__file__).read_text()
    (tmp_path / "new_moe.py").write_text(text)
    found = families_of(families)
    assert set(found) == {*FAMILIES, "new_moe"}
    for name, family in found.items():
        monkeypatch.setitem(FAMILIES, name, family)
    hf = read_settings(tmp_path, "qwen2_moe", model_type="new_moe")
    assert found["new_moe"].tensor_names(hf) == FAMILIES["qwen2_moe"].tensor_names(hf | {"model_type": "qwen2_moe"})


LLAMA3 = {"rope_type": "llama3", "factor": 8.0}
YARN, OSS_YARN = (MODELS[name]["rope_parameters"] for name in ("deepseek_v3", "gpt_oss"))


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
        ("olmoe", {"mlp_bias": True}, "mlp_bias = True is not supported, only False"),
        ("qwen3", {"attention_bias": True}, "attention_bias = true is not supported for qwen3"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window = True is not supported, only False"),
        ("qwen3", {"rope_scaling": {"type": "yarn"}}, "'yarn' is not supported; known are default, llama3"),
        ("llama", {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}}, "low_freq_factor = 2.0 .*, only 1.0"),
        ("qwen3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported for qwen3"),
        ("mixtral", {"sliding_window": 4096}, "sliding_window = 4096 is not supported for mixtral, only None"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported for olmoe, only None"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias = False is not supported for qwen2_moe, only True"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob = False .* Megatron-Core normalises"),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace = 2 is not supported .* only 1"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "none"]}, "must name dense or sparse for each of the layers"),
        ("minimax_m2", {"routed_scaling_factor": 2.0}, "routed_scaling_factor = 2.0 is not supported for minimax_m2"),
        ("minimax_m2", {"rotary_dim": 24}, "rotates 1.5 of a head; expected a share up to 1"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias = False is not supported for minimax_m2"),
        ("qwen3_5", {"attention_bias": True}, "attention_bias = true is not supported for qwen3_5"),
        ("deepseek_v3", {"topk_group": 1}, "topk_group = 1: a group's score is the sum of its two best"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax' is not supported"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = False is not supported"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("deepseek_v3", {"v_head_dim": 25}, "v_head_dim = 25 is more than"),
        ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 0}}, "'yarn' needs mscale"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "convert them to bfloat16 first"),
        ("deepseek_v3", {"first_k_dense_replace": None}, "wrong type: .*; settings that are null: .*first_k_dense"),
        ("mixtral", {"num_local_experts": None}, "the number of experts is missing, which a mixtral needs"),
        ("deepseek_v3", {"rope_parameters": YARN | {"attention_factor": 1.5}}, "attention_factor = 1.5 is not"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob = False is not supported for qwen3_5_moe"),
        ("deepseek_v3", {"rope_parameters": YARN | {"truncate": False}}, "truncate = False is not supported"),
        ("gpt_oss", {"rope_parameters": OSS_YARN | {"factor": None}}, "'yarn' needs factor"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias = False is not supported for gpt_oss, only True"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0 is not supported for gpt_oss, only 1.702"),
        ("gpt_oss", {"swiglu_limit": None}, "swiglu_limit = None must be more than 0"),
        ("gpt_oss", {"sliding_window": 0}, "sliding_window = 0 must be 1 or more"),
        ("gpt_oss", {"layer_types": ["full_attention", "chunked_attention"]}, "must name one of sliding_attention"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "for each of the layers"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "= 3 is no multiple of linear_num_key_heads = 2"),
        ("qwen3_moe", {"model_type": ["qwen3_moe"]}, "model_type .* is not supported"),
        ("llama", {"model_type": "gpt2"}, "'gpt2' is not supported; known are deepseek_v3, glm4_moe, glm4_moe_lite"),
    ],
)
def test_settings_that_a_family_does_not_support_are_refused(tmp_path, name, settings, words):
    read_settings(tmp_path, name)
    with pytest.raises(UserError, match=words) as refused:
        read_settings(tmp_path, name, **settings)
    assert "\n" not in str(refused.value)


def test_nested_settings_of_a_language_model_are_read_like_those_of_a_plain_one(tmp_path):
    """So is its end-of-sequence token."""
    hf = read_settings(tmp_path, "qwen3_5_moe")
    alone = read_settings(tmp_path, "qwen3_next")
    names = set(hf) & set(alone) - {"model_type", "intermediate_size", "divided"}
    assert {name: hf[name] for name in names} == {name: alone[name] for name in names} and len(names) > 30
    outside = config_settings("qwen3_5_moe")
    (tmp_path / "config.json").write_text(json.dumps(outside))
    assert end_of_sequence(tmp_path) == {1}


@pytest.mark.parametrize("name", ["vocab_size", "rms_norm_eps", "num_experts_per_tok", "kv_lora_rank"])
def test_errors_name_a_missing_setting(tmp_path, name):
    """Also one that is read only when the model is built."""
    lacking = {key: value for key, value in config_settings("deepseek_v3").items() if key != name}
    (tmp_path / "config.json").write_text(json.dumps(lacking))
    with pytest.raises(UserError, match=f"lacks the setting '{name}', which a deepseek_v3 needs"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_those_of_transformers(model_type):
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(model_type).to_dict()
    theirs |= theirs.get("text_config", {})
    rope = theirs["rope_parameters"]
    theirs |= rope
    # what transformers has under another name, or as code that no setting changes
    theirs.setdefault("rope_scaling", {key: value for key, value in rope.items() if key != "rope_theta"})
    for name, value in {"norm_topk_prob": True, "routed_scaling_factor": 1.0}.items():
        theirs.setdefault(name, value)
    if layers := theirs.get("mlp_layer_types"):
        theirs.setdefault("first_k_dense_replace", layers.index("sparse"))
    kinds = theirs.get("layer_types", [])
    theirs.setdefault("full_attention_interval", 1 + kinds.index("full_attention") if kinds else None)
    ours = FAMILIES[model_type].defaults
    assert {key: theirs[key] for key in ours} == dict(ours)


@pytest.mark.parametrize("name", MODELS)
def test_tensor_names_are_those_of_transformers(tmp_path, name):
    import torch
    from transformers import AutoConfig

    tied = name in ("llama", "qwen3_moe")
    hf = read_settings(tmp_path, name, tie_word_embeddings=tied)
    config = AutoConfig.for_model(**config_settings(name, tie_word_embeddings=tied))
    with torch.device("meta"):
        theirs = set(auto_model(name).from_config(config).state_dict())
    if hf["model_type"] in ("mixtral", "minimax_m2"):  # files have older names, also those that transformers writes
        theirs = {key.replace(".mlp.", ".block_sparse_moe.") for key in theirs}
    fused = {key for key in theirs if ".experts." in key}  # in transformers a tensor has all experts of a layer
    family = FAMILIES[hf["model_type"]]
    theirs = {key for key in theirs if not family.copies(hf, key)}
    ours = {re.sub(r"\[.*\]", "", key) for key in family.tensor_names(hf)}  # without a range of rows
    experts = {key for key in ours if ".experts." in key}
    assert ours - experts == theirs - fused - ({"lm_head.weight"} if tied else set())
    sparse = len(hf["sparse_layers"])
    each, all_of_a_layer = (4, 4) if hf["model_type"] == "gpt_oss" else (3, 2)  # with biases; gate and up are one
    assert len(experts) == sparse * (hf["num_experts"] or 0) * each and len(fused) == all_of_a_layer * sparse


def test_config_json_decides_which_layers_have_experts(tmp_path):
    def pattern(name, **settings):
        hf = read_settings(tmp_path, name, num_hidden_layers=4, **settings)
        return FAMILIES[hf["model_type"]].megatron_settings(hf).get("moe_layer_freq")

    assert pattern("qwen3_moe") is None
    assert pattern("qwen3_moe", decoder_sparse_step=2) == [0, 1, 0, 1]
    assert pattern("qwen2_moe", mlp_only_layers=[0, 3]) == [0, 1, 1, 0]
    assert pattern("glm4_moe", first_k_dense_replace=3) == [0, 0, 0, 1]
    assert pattern("glm4_moe", mlp_layer_types=["sparse"] * 4) == [0, 1, 1, 1]  # transformers ignores it
    assert pattern("glm4_moe_lite") == [0, 1, 1, 1]
    assert pattern("glm4_moe_lite", mlp_layer_types=["sparse", "dense", "sparse", "dense"]) == [1, 0, 1, 0]


def test_the_rotated_share_of_a_head_has_an_older_name(tmp_path):
    """MiniMax-M2's published config.json has rotary_dim; transformers writes the share, which then counts."""
    assert read_settings(tmp_path, "minimax_m2")["rotary_fraction"] == 0.5
    assert read_settings(tmp_path, "minimax_m2", rotary_dim=None)["rotary_fraction"] == 1.0
    written = {"rope_type": "default", "partial_rotary_factor": 0.25}
    assert read_settings(tmp_path, "minimax_m2", rope_parameters=written)["rotary_fraction"] == 0.25


def test_config_json_decides_which_layers_have_windows(tmp_path):
    """Every second layer, beginning with the first, if it does not name them."""

    def windows(**settings):
        hf = read_settings(tmp_path, "gpt_oss", num_hidden_layers=4, **settings)
        family = FAMILIES["gpt_oss"]
        megatron = family.megatron_settings(hf)
        return [family.window(hf, layer) for layer in range(4)], megatron.get("window_attn_skip_freq")

    assert windows() == ([6, None, 6, None], [1, 0, 1, 0])
    named = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert windows(layer_types=named) == ([None, 6, 6, None], [0, 1, 1, 0])
    assert windows(sliding_window=None) == ([None] * 4, None)
    assert windows(layer_types=["full_attention"] * 4) == ([None] * 4, None)


HALVES = Layout(2, 2, expert_tensor_parallel=1, expert_parallel=2)


@pytest.mark.parametrize(
    ("name", "settings", "layout", "problem"),
    [
        ("gpt_oss", {}, replace(HALVES, ranks=4, expert_tensor_parallel=2), "= 2: this model's experts have biases"),
        ("glm4_moe", {"moe_intermediate_size": 25, "n_shared_experts": 1}, HALVES, "width of its shared experts = 25"),
        (
            "glm4_moe",
            {"intermediate_size": 49},
            HALVES,
            "tensor_parallel = 2 does not divide .* intermediate_size = 49",
        ),
        ("qwen3_moe", {"intermediate_size": 49}, HALVES, None),  # no layer has this width
        ("qwen3_next", {}, Layout(2, context_parallel=2), None),
        (
            "qwen3_next",
            {},
            Layout(4, context_parallel=4),
            "tensor_parallel .* context_parallel = 4 .*linear_num_key_heads",
        ),
    ],
)
def test_layouts_that_do_not_divide_the_widths_of_a_model_are_refused(tmp_path, name, settings, layout, problem):
    found = list(layout.problems(read_settings(tmp_path, name, **settings)))
    assert len(found) == (problem is not None) and all(re.search(problem, text) for text in found), found
