"""Tiny random models with peaked distributions, saved as Hugging Face directories."""

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.actor.conftest import auto_model

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
STATES = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 64,
    "rms_norm_eps": 1e-2,  # else the norm may magnify rounding errors of a state
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
FAMILIES = {
    "qwen3": {},
    "qwen3_moe": EXPERTS,
    "qwen3_next": EXPERTS | STATES,
    "qwen3_5": STATES,
    "qwen3_5_moe": EXPERTS | STATES,
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 6},
    "mistral": {"sliding_window": 6},
}


def save(path, kind="qwen3_moe", vocabulary=39, seed=0, spread=0.2, **changes):
    torch.manual_seed(seed)
    settings = SIZES | {"vocab_size": vocabulary, "initializer_range": spread} | FAMILIES[kind] | changes
    if kind.startswith("qwen3_5"):
        settings = {"text_config": settings, "vision_config": VISION}
    model = auto_model(kind).from_config(AutoConfig.for_model(kind, **settings))
    for name, parameter in model.named_parameters():
        if kind == "gpt_oss" and name.endswith(("bias", "sinks")):
            torch.nn.init.normal_(parameter)
        elif name.endswith("conv1d.weight"):
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(path)
    return path


def changed(path, change):
    """The model in ``path``, after ``change`` was called with the dictionary of its weights."""
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path
