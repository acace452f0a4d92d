"""Settings of a recipe that preflight and `megarl plan` refuse because the model's layers do not support them."""

from contextlib import nullcontext

import pytest

from megarl.errors import UserError
from megarl.models.settings import check_layers
from tests.actor.conftest import make_recipe, read_settings


def test_a_norm_per_head_is_refused_where_the_model_has_one_over_all_heads(tmp_path):
    recipe = make_recipe(megatron={"qk_layernorm": True})
    check_layers(recipe, read_settings(tmp_path, "qwen3"))
    with pytest.raises(UserError, match="qk_layernorm: .*this model normalises queries and keys over all heads"):
        check_layers(recipe, read_settings(tmp_path, "olmoe"))


GPU = {"backend": "cuda"}
FUSED = GPU | {"layers": "transformer_engine"}


@pytest.mark.parametrize(
    ("family", "recompute", "refused"),
    [
        ("qwen3", ["mlp", "core_attn", "layernorm"], None),
        ("qwen3_moe", ["layernorm", "moe"], None),
        ("qwen3_moe", ["shared_experts"], "'shared_experts': no layer of this qwen3_moe has it"),
        ("qwen3_moe", ["moe_act"], "'moe_act': only Transformer Engine's experts can recompute it"),
        ("glm4_moe", ["mlp", "shared_experts"], None),
        ("glm4_moe", ["moe", "shared_experts"], '"moe" includes "shared_experts"'),
        ("deepseek_v3", ["mla_up_proj"], "'mla_up_proj': latent attention is megarl's own"),
        ("qwen3_next", ["core_attn", "moe"], None),
    ],
)
def test_parts_that_a_model_cannot_recompute_are_refused(tmp_path, family, recompute, refused):
    hf = read_settings(tmp_path, family)
    with pytest.raises(UserError, match=refused) if refused else nullcontext():
        check_layers(make_recipe(actor={"recompute": recompute}), hf)


def test_recomputation_settings_outside_actor_and_contradictions_are_refused(tmp_path):
    hf = read_settings(tmp_path, "glm4_moe")
    for megatron, actor, message in (
        ({"recompute_granularity": "selective"}, {}, r"recompute_granularity: use \[actor\] recompute"),
        ({"recompute_num_layers": 2}, {"recompute": ["mlp"]}, "recompute_num_layers: it has an effect only with"),
        ({"recompute_num_layers": 0}, {"recompute": "full"}, "recompute_num_layers = 0: must be at least 1"),
        ({"moe_shared_expert_overlap": True}, {"recompute": ["shared_experts"]}, "moe_shared_expert_overlap = true"),
    ):
        with pytest.raises(UserError, match=message):
            check_layers(make_recipe(actor=actor, megatron=megatron), hf)
    check_layers(make_recipe(actor={"recompute": "full"}, megatron={"recompute_num_layers": 2}), hf)


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


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"actor": GPU, "megatron": {"fp8": "hybrid"}}, 'needs .actor. backend = "cuda" and layers = "transformer_eng'),
        ({"actor": GPU, "megatron": {"fp8": "e4m3", "fp8_recipe": "custom"}}, "known are delayed, tensorwise"),
        ({"actor": GPU, "megatron": {"fp8": "e4m3", "fp8_param": True}}, "fp8_param = true: megarl reads and exports"),
        ({"actor": GPU, "megatron_ddp": {"fp8_param_gather": True}}, r"\[megatron_ddp\] fp8_param_gather = true"),
        ({"actor": GPU, "megatron": {"fp4": "e2m1"}}, "fp4"),
        (
            {"actor": FUSED | {"recompute": ["layernorm"]}, "megatron": {"fp8": "e4m3"}},
            'another .megatron. fp8_recipe than "delayed"',
        ),
    ],
)
def test_fp8_that_cannot_work_is_refused(tmp_path, tables, message):
    with pytest.raises(UserError, match=message):
        check_layers(make_recipe(**tables), read_settings(tmp_path, "qwen3_moe"))


def test_fp8_works_for_latent_attention_and_with_recomputed_activations(tmp_path):
    recipe = make_recipe(actor=FUSED, megatron={"fp8": "hybrid", "fp8_recipe": "blockwise"})
    check_layers(recipe, read_settings(tmp_path, "qwen3_moe"))
    check_layers(recipe, read_settings(tmp_path, "deepseek_v3"))
    acts = make_recipe(actor=FUSED | {"recompute": ["moe_act"]}, megatron={"fp8": "hybrid", "fp8_recipe": "tensorwise"})
    check_layers(acts, read_settings(tmp_path, "qwen3_moe"))


@pytest.mark.parametrize(
    ("actor", "megatron", "message"),
    [
        (
            {"expert_parallel": 2},
            {"moe_flex_dispatcher_backend": "hybridep"},
            "hybridep.*as if each had the same number",
        ),
        ({}, {}, "DeepEP sends tokens to experts on other GPUs, and here there are none; remove it"),
        ({"tensor_parallel": 17}, {}, r"to 32 experts at most, not 34, .* use \[actor\] expert_tensor_parallel = 1"),
        ({"expert_parallel": 2}, {"moe_token_dispatcher_type": "allgather"}, "needs micro-batches of one length"),
    ],
)
def test_dispatchers_that_cannot_work_are_refused(tmp_path, actor, megatron, message):
    hf = read_settings(tmp_path, "qwen3_moe")
    flex = {"moe_token_dispatcher_type": "flex"}
    check_layers(make_recipe(actor={"backend": "cuda", "expert_parallel": 2}, megatron=flex), hf)
    with pytest.raises(UserError, match=message):
        check_layers(make_recipe(actor={"backend": "cuda"} | actor, megatron=flex | megatron), hf)
