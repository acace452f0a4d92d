"""Settings of a recipe that preflight and `megarl plan` refuse because the model's layers do not support them."""

from contextlib import nullcontext

import pytest

from megarl.errors import UserError
from megarl.models.settings import check_layers
from tests.actor.conftest import make_recipe, read_settings

GPU = {"backend": "cuda"}
FUSED = GPU | {"layers": "transformer_engine"}
FLEX = {"moe_token_dispatcher_type": "flex"}
WAYS = GPU | {"expert_parallel": 2}
FULL = {"recompute": "full"}


def parts(*names):
    return {"recompute": list(names)}


@pytest.mark.parametrize(
    ("family", "actor", "megatron", "refused"),
    [
        ("qwen3", {}, {"qk_layernorm": True}, None),
        ("olmoe", {}, {"qk_layernorm": True}, "qk_layernorm: .*normalises queries and keys over all heads"),
        # parts that are recomputed
        ("qwen3_moe", parts("layernorm", "moe"), {}, None),
        ("qwen3_moe", parts("shared_experts"), {}, "'shared_experts': no layer of this qwen3_moe has it"),
        ("qwen3_moe", parts("moe_act"), {}, "'moe_act': only Transformer Engine's experts can recompute it"),
        ("glm4_moe", parts("moe", "shared_experts"), {}, '"moe" includes "shared_experts"'),
        ("deepseek_v3", parts("mla_up_proj"), {}, "'mla_up_proj': latent attention is megarl's own"),
        # Megatron's settings of recomputation
        ("glm4_moe", {}, {"recompute_granularity": "selective"}, r"granularity: use \[actor\] recompute"),
        ("glm4_moe", parts("mlp"), {"recompute_num_layers": 2}, "recompute_num_layers: it has an effect only with"),
        ("glm4_moe", parts("shared_experts"), {"moe_shared_expert_overlap": True}, "moe_shared_expert_overlap = true"),
        ("glm4_moe", FULL, {"recompute_num_layers": 0}, "recompute_num_layers = 0: must be at least 1"),
        ("glm4_moe", FULL, {"recompute_num_layers": 2}, None),
        # products in 8 bits
        ("qwen3_moe", GPU, {"fp8": "hybrid"}, 'needs .actor. backend = "cuda" and layers = "transformer_eng'),
        ("qwen3_moe", GPU, {"fp8": "e4m3", "fp8_recipe": "custom"}, "known are delayed, tensorwise"),
        ("qwen3_moe", GPU, {"fp8": "e4m3", "fp8_param": True}, "fp8_param = true: megarl reads and exports"),
        ("qwen3_moe", GPU, {"fp4": "e2m1"}, "fp4"),
        ("qwen3_moe", FUSED | parts("layernorm"), {"fp8": "e4m3"}, 'another .megatron. fp8_recipe than "delayed"'),
        ("deepseek_v3", FUSED, {"fp8": "hybrid", "fp8_recipe": "blockwise"}, None),
        ("qwen3_moe", FUSED | parts("moe_act"), {"fp8": "hybrid", "fp8_recipe": "tensorwise"}, None),
        # dispatchers of tokens
        ("qwen3_moe", WAYS, FLEX, None),
        ("qwen3_moe", WAYS, FLEX | {"moe_flex_dispatcher_backend": "hybridep"}, "as if each had the same number"),
        ("qwen3_moe", WAYS, {"moe_token_dispatcher_type": "allgather"}, "needs micro-batches of one length"),
    ],
)
def test_settings_that_the_layers_do_not_support_are_refused(tmp_path, family, actor, megatron, refused):
    hf = read_settings(tmp_path, family)
    with pytest.raises(UserError, match=refused) if refused else nullcontext():
        check_layers(make_recipe(actor=actor, megatron=megatron), hf)


def test_gathering_parameters_in_8_bits_is_refused(tmp_path):
    recipe = make_recipe(actor=GPU, megatron_ddp={"fp8_param_gather": True})
    with pytest.raises(UserError, match=r"\[megatron_ddp\] fp8_param_gather = true"):
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
