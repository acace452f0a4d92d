"""Settings of a recipe that preflight and `megarl plan` refuse because the model's layers do not support them."""

from contextlib import nullcontext

import pytest

from megarl.errors import UserError
from megarl.models.settings import check_layers
from tests.actor.conftest import make_recipe, read_settings

FUSED = {"backend": "cuda", "layers": "transformer_engine"}
FULL = {"recompute": "full"}


def parts(*names):
    return {"recompute": list(names)}


@pytest.mark.parametrize(
    ("family", "actor", "megatron", "refused"),
    [
        ("glm4_moe", {}, {"moe_router_bias_update_rate": 1e-3, "moe_router_dtype": "fp64"}, None),
        ("qwen3", {}, {"qk_layernorm": False}, "qk_layernorm: config.json decides it"),
        ("qwen3", {}, {"window_size": []}, "window_size: config.json decides it"),
        ("gpt_oss", {}, {"glu_linear_offset": 0.0}, "glu_linear_offset: config.json decides it"),
        ("qwen3", {}, {"hidden_dropout": 0.1}, "hidden_dropout = 0.1: megarl does not support it"),
        ("qwen3", {}, {"hidden_dropout": 0.0}, None),
        # parts that are recomputed
        ("qwen3_moe", parts("layernorm", "moe"), {}, None),
        ("qwen3_moe", parts("shared_experts"), {}, "'shared_experts': no layer of this qwen3_moe has it"),
        ("qwen3_moe", parts("moe_act"), {}, "'moe_act': only Transformer Engine's experts can recompute it"),
        ("glm4_moe", parts("moe", "shared_experts"), {}, '"moe" includes "shared_experts"'),
        # Megatron's settings of recomputation
        ("glm4_moe", {}, {"recompute_granularity": "selective"}, r"granularity: use \[actor\] recompute"),
        ("glm4_moe", parts("mlp"), {"recompute_num_layers": 2}, "recompute_num_layers: it has an effect only with"),
        ("glm4_moe", FULL, {"recompute_num_layers": 0}, "recompute_num_layers = 0: must be at least 1"),
        ("glm4_moe", FULL, {"recompute_num_layers": 2}, None),
        ("qwen3_moe", FUSED | parts("moe_act"), {}, None),
        ("qwen3_moe", FUSED, {"fp8": "hybrid"}, "fp8 = 'hybrid': megarl does not support it"),
        ("qwen3_moe", FUSED, {"fp4": "e2m1"}, "fp4 = 'e2m1'"),
        ("qwen3_moe", FUSED, {"params_dtype": "float32"}, "params_dtype = 'float32': megarl does not support it"),
    ],
)
def test_settings_that_the_layers_do_not_support_are_refused(tmp_path, family, actor, megatron, refused):
    hf = read_settings(tmp_path, family)
    with pytest.raises(UserError, match=refused) if refused else nullcontext():
        check_layers(make_recipe(actor=actor, megatron=megatron), hf)


def test_gathering_parameters_in_8_bits_is_refused(tmp_path):
    recipe = make_recipe(megatron_ddp={"fp8_param_gather": True})
    with pytest.raises(UserError, match=r"\[megatron_ddp\] fp8_param_gather = True"):
        check_layers(recipe, read_settings(tmp_path, "qwen3_moe"))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("some", "neither 'none' nor 'full' nor a list of core_attn"),
        (["moee"], "'moee' is not a part of a layer; did you mean 'moe'"),
        (["mlp", "mlp"], "at least one part of a layer, and none twice"),
    ],
)
def test_invalid_values_of_recompute_are_refused(value, message):
    with pytest.raises(UserError, match=message):
        make_recipe(actor={"recompute": value})
