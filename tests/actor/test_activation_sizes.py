"""`megarl plan`'s estimate of what a layer keeps for its backward pass, against the tensors that autograd saves."""

import numpy as np
import pytest
import torch

from megarl.models import family_of
from megarl.models.family import ActivationSettings
from megarl.planner import sizes
from megarl.recipe.layout import Layout
from tests.actor.conftest import SHAPE, make_recipe

pytestmark = pytest.mark.usefixtures("one_rank")
HF = SHAPE | dict(
    hidden_size=128, intermediate_size=320, num_attention_heads=8, head_dim=16, moe_intermediate_size=96,
    num_experts_per_tok=2, norm_topk_prob=True, rope_theta=1e4, rope_scaling_factor=None, rotary_fraction=1.0,
    max_position_embeddings=1024,
)  # fmt: skip
TOKENS = 1000
WITH_EXPERTS = ("deepseek_v3", "qwen3_next", "gpt_oss")


def saved_bytes(family, layers, recompute, **settings):
    """Bytes of the distinct storages that autograd keeps after a forward pass, without those of parameters."""
    from megarl.actor.model import build_model
    from megarl.actor.packing import Sample, micro_batches

    hf = HF | OTHERS.get(family, {}) | {"model_type": family, "num_hidden_layers": layers} | settings
    hf |= {"num_experts": 8 if "moe" in family or family in WITH_EXPERTS else None}
    (model,) = build_model(hf, make_recipe(actor={"recompute": recompute}))
    length = TOKENS // 4
    samples = [Sample(np.zeros(1, np.int32), np.arange(length - 1) % 67, np.zeros(length - 1), 1.0) for _ in range(4)]
    (batch,) = micro_batches(samples, 10**6, torch.device("cpu"))
    known, saved = {p.untyped_storage()._cdata for p in model.parameters()}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(batch.tokens, batch.positions, None, labels=batch.labels, packed_seq_params=batch.packed)
    assert output[0].requires_grad
    return sum(storage.nbytes() for storage in saved.values())  # after the pass, when recomputed parts are freed


OTHERS = {
    "olmoe": {},
    "qwen2_moe": dict(shared_expert_intermediate_size=200),
    "glm4_moe": dict(
        use_qk_norm=True, attention_bias=False, n_shared_experts=2, n_group=1, topk_group=1, routed_scaling_factor=1.5,
        first_k_dense_replace=0, rotary_fraction=0.5,
    ),
    "deepseek_v3": dict(
        n_shared_experts=1, n_group=1, topk_group=1, routed_scaling_factor=2.5, first_k_dense_replace=0, rope_yarn=None,
        q_lora_rank=96, kv_lora_rank=80, qk_nope_head_dim=24, qk_rope_head_dim=8, v_head_dim=16,
    ),
    "qwen3_next": dict(
        shared_expert_intermediate_size=200, rotary_fraction=0.25, full_attention_interval=1, linear_num_key_heads=4,
        linear_num_value_heads=8, linear_key_head_dim=32, linear_value_head_dim=24, linear_conv_kernel_dim=4,
    ),
    "gpt_oss": dict(sliding_window=40, swiglu_limit=7.0),
}  # fmt: skip


def test_dense_layer_of_a_moe_model_is_estimated_like_a_layer_of_a_dense_model():
    hf = HF | OTHERS["glm4_moe"] | {"model_type": "glm4_moe", "num_experts": 8, "first_k_dense_replace": 1}
    dense = HF | {"model_type": "qwen3", "num_experts": None}
    assert layer_bytes(hf, layer=0) == layer_bytes(dense) < layer_bytes(hf, layer=1)


def layer_bytes(hf, layer=0, **options):
    return sizes.layer_bytes(hf, Layout(1), TOKENS, family_of(hf).sublayers(hf, layer), **options)


def expected_bytes(family, again=(), **settings):
    hf = HF | OTHERS.get(family, {}) | {"model_type": family} | settings
    hf |= {"num_experts": 8 if "moe" in family or family in WITH_EXPERTS else None}
    # an RMSNorm on the CPU is not fused, and keeps its normalised input too
    of_attention = dict.fromkeys(("qwen3", "qwen3_moe", "glm4_moe", "qwen3_next"), 128 + 32) | {"deepseek_v3": 96 + 80}
    # attention with sinks keeps queries, keys, values and outputs with one more dimension, a copy of the output and a
    # mask; without them the projection, queries, keys and two outputs of 8 heads and 2 key-value heads of 16 dimensions
    of_attention["gpt_oss"] = (2 * 8 + 2 * 2) * 17 + 128 + 62 - (12 + 10 + 2 * 8) * 16
    norms = (0 if "layernorm" in again else 2 * 128) + of_attention.get(family, 0)
    if family == "qwen3_next":
        norms -= 32  # the estimate, in bfloat16, has float32 copies of queries and keys; float32 keys are not copied
    if family != "deepseek_v3" and "core_attn" not in again:
        norms += 128  # on the CPU each run of equal lengths is attended to by itself, and the outputs are concatenated
    return layer_bytes(hf, width=4, settings=ActivationSettings(frozenset(again))) + 4 * norms * TOKENS


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", *OTHERS])
def test_estimate_of_a_layer_agrees_with_autograd(family):
    measured = saved_bytes(family, 2, "none") - saved_bytes(family, 1, "none")
    assert expected_bytes(family) == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize(
    ("family", "again"),
    [
        ("llama", ["core_attn"]),
        ("llama", ["layernorm"]),
        ("llama", ["mlp"]),
        ("qwen3", ["core_attn", "layernorm", "mlp"]),
        ("qwen3_moe", ["core_attn"]),
        ("qwen3_moe", ["layernorm"]),
        ("qwen3_moe", ["moe"]),
        ("qwen3_moe", ["layernorm", "moe"]),
        ("olmoe", ["core_attn", "moe"]),
        ("qwen2_moe", ["shared_experts"]),
        ("glm4_moe", ["shared_experts", "layernorm"]),
        ("deepseek_v3", ["core_attn"]),
        ("deepseek_v3", ["layernorm", "moe"]),
        ("qwen3_next", ["core_attn", "shared_experts"]),
        ("qwen3_next", ["layernorm", "moe"]),
    ],
)
def test_estimate_of_a_layer_with_recomputed_parts_agrees_with_autograd(family, again):
    measured = saved_bytes(family, 2, again) - saved_bytes(family, 1, again)
    assert expected_bytes(family, again) == pytest.approx(measured, rel=0.02)
    assert measured < 0.97 * expected_bytes(family)


def test_full_recomputation_keeps_only_the_input_of_a_layer():
    measured = saved_bytes("qwen3_moe", 3, "full") - saved_bytes("qwen3_moe", 2, "full")
    assert measured == pytest.approx(4 * TOKENS * 128, rel=0.02)


def test_estimate_of_a_layer_with_linear_attention_agrees_with_autograd():
    hf = HF | OTHERS["qwen3_next"] | {"model_type": "qwen3_next", "num_experts": 8, "full_attention_interval": 9}
    measured = [saved_bytes("qwen3_next", layers, "none", full_attention_interval=9) for layers in (1, 2)]
    norms = 2 * 128 + 8 * 24  # normalised inputs, as in `expected_bytes`
    norms += 8 * 24  # float32 queries and keys are views of a tensor that has the values too; bfloat16 ones are copied
    expected = layer_bytes(hf, width=4) + 4 * norms * TOKENS
    assert expected == pytest.approx(measured[1] - measured[0], rel=0.02)
