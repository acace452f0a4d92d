"""Checks of ``[actor.lora]`` before any process starts."""

import pytest

from megarl.errors import UserError
from megarl.models.lora import check_lora, targeted
from tests.actor.conftest import make_recipe, read_settings


def names(hf, layer, *targets):
    return [matrix.name for matrix in targeted(hf, layer, targets)]


def test_a_target_matches_matrices_by_the_end_of_their_name(tmp_path):
    hf = read_settings(tmp_path, "glm4_moe_qk_norm")
    assert names(hf, 0, "linear_fc1") == ["mlp.linear_fc1"]
    assert names(hf, 1, "linear_fc1") == ["mlp.experts.linear_fc1", "mlp.shared_experts.linear_fc1"]
    assert names(hf, 1, "experts.linear_fc1", "fc2") == ["mlp.experts.linear_fc1"]


OVERLAP = {"megatron": {"moe_shared_expert_overlap": True}}
BIAS = {"megatron": {"moe_router_bias_update_rate": 1e-3}}
OFFLOAD = {"megatron_optimizer": {"optimizer_cpu_offload": True}}
PIPELINE = {"actor": {"pipeline_parallel": 2}}
DIVIDED = {"actor": {"expert_parallel": 2, "expert_tensor_parallel": 2}}


@pytest.mark.parametrize(
    ("family", "lora", "tables", "message"),
    [
        (
            "qwen3_moe",
            {"targets": ["q_proj"]},
            {},
            "'q_proj' matches no matrix of this .*: targets = .\"self_attention.",
        ),
        ("deepseek_v3", {}, {}, '\'linear_qkv\' .*: targets = ."self_attention.linear_q_down_proj", "self_attention'),
        ("glm4_moe", {"targets": ["experts.linear_fc1"]}, PIPELINE, "layers 0 to 0 have none of these matrices"),
        ("qwen3_moe", {"targets": ["linear_fc2"]}, DIVIDED, "expert_tensor_parallel = 2 must be 1 or tensor_parallel"),
        ("qwen3", {}, OVERLAP, "moe_shared_expert_overlap = true"),
        ("glm4_moe", {}, BIAS, "updates of the router's bias would be lost"),
        ("qwen3", {}, OFFLOAD, "optimizer_cpu_offload = true"),
    ],
)
def test_adapters_that_model_or_layout_cannot_have_are_refused(tmp_path, family, lora, tables, message):
    hf, plain = read_settings(tmp_path, family), make_recipe(**tables)
    check_lora(plain, hf)
    actor = plain.actor.model_dump(exclude_none=True) | {"lora": {"rank": 8} | lora}
    with pytest.raises(UserError, match=message):
        check_lora(make_recipe(**tables | {"actor": actor}), hf)


@pytest.mark.parametrize("table", [{"rank": 0}, {"alpha": 0.0}, {"targets": []}, {"rank": 4, "dropout": 0.1}])
def test_empty_and_unknown_settings_are_refused(table):
    with pytest.raises(UserError, match=f"actor.lora.{list(table)[-1]}"):
        make_recipe(actor={"lora": table})
