"""Fixtures of the actor's tests: a process group of one rank with Megatron's groups, and tiny Hugging Face models."""

import functools
import json
import os

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from megarl.models import FAMILIES as MODEL_TYPES
from megarl.models.hf_config import read_hf_config
from megarl.recipe.load import parse_recipe

SHAPE = dict(
    vocab_size=67,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    initializer_range=0.2,
    eos_token_id=1,
    pad_token_id=0,
    bos_token_id=None,
)
# a model with experts, as `megarl.models.hf_config.read_hf_config` returns it; `num_experts` is to be added
EXPERTS = SHAPE | dict(
    model_type="qwen3_moe", num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True, rope_theta=1e4,
    rope_scaling_factor=None, rotary_fraction=1.0,
)  # fmt: skip
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
ROUTED = dict(n_routed_experts=8, moe_intermediate_size=24, first_k_dense_replace=1, num_nextn_predict_layers=0)
GLM = ROUTED | dict(num_experts_per_tok=2, attention_bias=True, routed_scaling_factor=1.5)
DEEPSEEK = ROUTED | dict(
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    q_lora_rank=24,
    kv_lora_rank=20,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    num_key_value_heads=4,
    head_dim=8,
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=10000.0,
        factor=4.0,
        beta_fast=32.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=0.5,  # differs from mscale, so that the rotation also scales vectors
        original_max_position_embeddings=16,
    ),
)
STATES = dict(
    full_attention_interval=2,
    rms_norm_eps=1e-2,  # an output of linear attention may be almost 0: its norm would then magnify the rounding
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
)
NEXT = STATES | MOE | dict(shared_expert_intermediate_size=40)
GPT_OSS = dict(
    num_local_experts=4,
    num_experts_per_tok=2,
    intermediate_size=24,
    sliding_window=6,
    swiglu_limit=1.0,  # low enough to clamp many activations of so small a model
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=150000.0,
        factor=4.0,
        beta_fast=8.0,
        beta_slow=1.0,
        truncate=False,
        original_max_position_embeddings=2048,  # so that a dimension lies between both ends of YaRN's ramp
    ),
)
FAMILIES = {
    "qwen3_moe": MOE | dict(norm_topk_prob=True),
    "qwen3_moe_unnormalised": MOE | dict(norm_topk_prob=False),
    "qwen3": {},
    "qwen3_tied": dict(tie_word_embeddings=True),
    "qwen2": dict(head_dim=8),
    "llama": {},
    "llama_rope_scaling": dict(rope_parameters=LLAMA3_ROPE),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "olmoe": dict(num_experts=4, num_experts_per_tok=2, head_dim=8),
    "olmoe_normalised": dict(num_experts=4, num_experts_per_tok=2, head_dim=8, norm_topk_prob=True),
    "qwen2_moe": MOE | dict(head_dim=8, shared_expert_intermediate_size=40, mlp_only_layers=[1]),
    "glm4_moe": GLM,
    "glm4_moe_qk_norm": GLM | dict(use_qk_norm=True, attention_bias=False, n_shared_experts=2),
    "deepseek_v3": DEEPSEEK,
    # as in GLM-4.7-Flash values are as wide as keys
    "glm4_moe_lite": DEEPSEEK | dict(n_group=1, topk_group=1, v_head_dim=24, rope_parameters=None),
    "minimax_m2": dict(num_local_experts=8, num_experts_per_tok=2, intermediate_size=24, rotary_dim=8),
    "gpt_oss": GPT_OSS,
    "gpt_oss_all_windows": GPT_OSS
    | dict(layer_types=["sliding_attention"] * 2, rope_parameters=dict(rope_type="default", rope_theta=150000.0)),
    "qwen3_next": NEXT,
    "qwen3_5_moe": NEXT,
    "qwen3_5": STATES,
    "qwen3_next_dense": NEXT | dict(mlp_only_layers=[1], layer_types=["full_attention", "linear_attention"]),
    "deepseek_v3_moonlight": DEEPSEEK
    | dict(q_lora_rank=None, n_group=1, topk_group=1, rope_parameters=None, rms_norm_eps=1e-5),
}
VISION = dict(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4, num_position_embeddings=16,
    out_hidden_size=32,
)  # fmt: skip


def model_type_of(family: str) -> str:
    """The model_type with which the name of a family begins."""
    return max((name for name in MODEL_TYPES if family.startswith(name)), key=len)


def config_settings(family: str, **changes):
    """The settings of a tiny model, as in its config.json."""
    model_type = model_type_of(family)
    settings = SHAPE | {"model_type": model_type} | FAMILIES[family] | changes
    if MODEL_TYPES[model_type].nested is None:
        return settings
    outside = {key: settings.pop(key) for key in ("model_type", "quantization_config") if key in settings}
    tied = {"tie_word_embeddings": settings.get("tie_word_embeddings", False)}
    return outside | tied | {"text_config": settings | tied, "vision_config": VISION}


def auto_model(family: str):
    """The Auto class of transformers whose models have all tensors of a family."""
    return AutoModelForImageTextToText if family.startswith("qwen3_5") else AutoModelForCausalLM


def make_hf_model(family: str, **changes):
    """A random float32 model whose norms and biases are not at their trivial initial values."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**config_settings(family, **changes))
    model = auto_model(family).from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            usual = float(parameter[0])  # 1, or 0 where the norm multiplies by its weight plus one
            torch.nn.init.uniform_(parameter, usual - 0.5, usual + 0.5)
        elif name.endswith(("bias", "A_log", "sinks")):
            torch.nn.init.normal_(parameter)
        elif "conv1d" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    return model


def read_settings(folder, family, **changes):
    """The settings of a tiny model, as megarl reads them from a config.json that is written to ``folder``."""
    (folder / "config.json").write_text(json.dumps(config_settings(family, **changes)))
    return read_hf_config(folder)


def make_recipe(model_path="model", **tables):
    defaults = {
        "model": {"path": str(model_path)},
        "data": {"source": "reasoning_gym", "train": "spell_backward", "max_prompt_tokens": 8},
        "reward": {"kind": "reasoning_gym"},
        "rollout": {"max_response_tokens": 24},
        "actor": {"backend": "cpu"},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1},
    }
    for name, table in tables.items():
        defaults[name] = defaults.get(name, {}) | table
    return parse_recipe(defaults)


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory):
    """``saved_model(family)``: the folder of a tiny model, written once, which no test changes."""

    @functools.cache
    def write(family):
        path = tmp_path_factory.mktemp(family)
        make_hf_model(family).save_pretrained(path)
        return path

    return write


@pytest.fixture(scope="package")
def one_rank():
    """A process group of one rank, which opens no port, with Megatron's groups; the value is the device."""
    from megarl.actor import cpu_backend

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    cpu_backend.install()
    from megatron.core import parallel_state as mpu

    from megarl.actor import parallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel.build_groups(make_recipe())
    yield torch.device("cpu")
    mpu.destroy_model_parallel()
    dist.destroy_process_group()
