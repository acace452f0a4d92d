"""Settings of a recipe that preflight and `megarl plan` refuse because the model's layers do not support them."""

from contextlib import nullcontext

import pytest

from megarl.errors import UserError
from megarl.models.settings import check_layers
from tests.actor.conftest import make_recipe, read_settings

GPU = {"backend": "cuda"}
FUSED = GPU | {"layers": "transformer_engine"}
FLEX = {"moe_token_dispatcher_type": "flex"}
HYBRID = FLEX | {"moe_flex_dispatcher_backend": "hybridep"}
WAYS = {"actor": GPU | {"expert_parallel": 2}}


def recomputed(*parts, **megatron):
    return {"actor": {"recompute": list(parts)}, "megatron": megatron}


def fp8(actor=FUSED, fp8="e4m3", **megatron):
    return {"actor": actor, "megatron": {"fp8": fp8, **megatron}}


@pytest.mark.parametrize(
    ("family", "tables", "refused"),
    [
        ("qwen3", {"megatron": {"qk_layernorm": True}}, None),
        ("olmoe", {"megatron": {"qk_layernorm": True}}, "qk_layernorm: .*normalises queries and keys over all heads"),
        # parts that are recomputed
        ("qwen3", recomputed("mlp", "core_attn", "layernorm"), None),
        ("qwen3_moe", recomputed("layernorm", "moe"), None),
        ("qwen3_moe", recomputed("shared_experts"), "'shared_experts': no layer of this qwen3_moe has it"),
        ("qwen3_moe", recomputed("moe_act"), "'moe_act': only Transformer Engine's experts can recompute it"),
        ("glm4_moe", recomputed("mlp", "shared_experts"), None),
        ("glm4_moe", recomputed("moe", "shared_experts"), '"moe" includes "shared_experts"'),
        ("deepseek_v3", recomputed("mla_up_proj"), "'mla_up_proj': latent attention is megarl's own"),
        ("qwen3_next", recomputed("core_attn", "moe"), None),
        # Megatron's settings of recomputation
        ("glm4_moe", {"megatron": {"recompute_granularity": "selective"}}, r"granularity: use \[actor\] recompute"),
        ("glm4_moe", recomputed("mlp", recompute_num_layers=2), "recompute_num_layers: it has an effect only with"),
        ("glm4_moe", recomputed("shared_experts", moe_shared_expert_overlap=True), "moe_shared_expert_overlap = true"),
        (
            "glm4_moe",
            {"actor": {"recompute": "full"}, "megatron": {"recompute_num_layers": 0}},
            "recompute_num_layers = 0: must be at least 1",
        ),
        ("glm4_moe", {"actor": {"recompute": "full"}, "megatron": {"recompute_num_layers": 2}}, None),
        # products in 8 bits
        ("qwen3_moe", fp8(GPU, "hybrid"), 'needs .actor. backend = "cuda" and layers = "transformer_eng'),
        ("qwen3_moe", fp8(GPU, fp8_recipe="custom"), "known are delayed, tensorwise"),
        ("qwen3_moe", fp8(GPU, fp8_param=True), "fp8_param = true: megarl reads and exports"),
        (
            "qwen3_moe",
            {"actor": GPU, "megatron_ddp": {"fp8_param_gather": True}},
            r"\[megatron_ddp\] fp8_param_gather = true",
        ),
        ("qwen3_moe", {"actor": GPU, "megatron": {"fp4": "e2m1"}}, "fp4"),
        ("qwen3_moe", fp8(FUSED | {"recompute": ["layernorm"]}), 'another .megatron. fp8_recipe than "delayed"'),
        ("qwen3_moe", fp8(fp8="hybrid", fp8_recipe="blockwise"), None),
        ("deepseek_v3", fp8(fp8="hybrid", fp8_recipe="blockwise"), None),
        ("qwen3_moe", fp8(FUSED | {"recompute": ["moe_act"]}, "hybrid", fp8_recipe="tensorwise"), None),
        # dispatchers of tokens
        ("qwen3_moe", WAYS | {"megatron": FLEX}, None),
        ("qwen3_moe", WAYS | {"megatron": HYBRID}, "hybridep.*as if each had the same number"),
        ("qwen3_moe", {"actor": GPU, "megatron": FLEX}, "DeepEP sends tokens .* and here there are none; remove it"),
        (
            "qwen3_moe",
            {"actor": GPU | {"tensor_parallel": 17}, "megatron": FLEX},
            r"to 32 experts at most, not 34, .* use \[actor\] expert_tensor_parallel = 1",
        ),
        (
            "qwen3_moe",
            WAYS | {"megatron": {"moe_token_dispatcher_type": "allgather"}},
            "needs micro-batches of one length",
        ),
    ],
)
def test_settings_that_the_layers_do_not_support_are_refused(tmp_path, family, tables, refused):
    hf = read_settings(tmp_path, family)
    with pytest.raises(UserError, match=refused) if refused else nullcontext():
        check_layers(make_recipe(**tables), hf)


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
