"""One gloo rank with Megatron's groups for all tests of the actor, and tiny Hugging Face models."""

import os

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

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
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
FAMILIES = {
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True),
    "qwen3_moe_unnormalised": dict(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=False
    ),
    "qwen3": {},
    "qwen3_tied": dict(tie_word_embeddings=True),
    "qwen2": dict(head_dim=8),
    "llama": {},
    "llama_rope_scaling": dict(rope_parameters=LLAMA3_ROPE),
}


def make_hf_model(family: str, **changes):
    """A random float32 model whose norms and biases are not at their trivial initial values."""
    model_type = "qwen3_moe" if "moe" in family else family.split("_")[0]
    settings = SHAPE | FAMILIES[family] | changes
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def make_recipe(model_path="model", **tables):
    defaults = {
        "model": {"path": str(model_path)},
        "data": {"source": "reasoning_gym", "train": "spell_backward"},
        "reward": {"kind": "reasoning_gym"},
        "actor": {"backend": "cpu"},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1},
    }
    for name, table in tables.items():
        defaults[name] = defaults.get(name, {}) | table
    return parse_recipe(defaults)


@pytest.fixture(scope="package")
def one_rank():
    """A process group of one: nothing listens. Returns the device."""
    from megarl.actor import cpu_backend

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    cpu_backend.install()
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mpu.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(0)
    yield torch.device("cpu")
    mpu.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def model_and_rollouts(tmp_path_factory):
    """A tiny Qwen3-MoE of four layers and a sealed stage of rollouts from a policy near it."""
    from tests.actor.layout_ranks import seal_rollouts

    folder = tmp_path_factory.mktemp("sealed")
    model = make_hf_model("qwen3_moe", num_hidden_layers=4, initializer_range=0.1)
    model.save_pretrained(folder / "model")
    seal_rollouts(model, folder / "rollouts")
    return folder / "model", folder / "rollouts"
