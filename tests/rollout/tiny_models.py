"""Tiny random models with peaked distributions, saved as Hugging Face directories."""

import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

SIZES = {
    "hidden_size": 64,
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
    "rms_norm_eps": 1e-2,  # a query may read almost nothing from a state, and the norm magnify its rounding errors
}


def save(path, kind="qwen3_moe", vocabulary=39, seed=0, spread=0.2, **changes):
    torch.manual_seed(seed)
    sizes = SIZES | {"vocab_size": vocabulary, "intermediate_size": 128, "initializer_range": spread} | changes
    if kind == "qwen3_moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **EXPERTS))
    elif kind == "qwen3_next":
        model = Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, **EXPERTS, **STATES))
        torch.nn.init.normal_(model.model.layers[0].linear_attn.conv1d.weight, std=0.5)
    elif kind == "qwen3_5_moe":
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
        config = Qwen3_5MoeConfig(text_config=sizes | EXPERTS | STATES, vision_config=vision)
        model = Qwen3_5MoeForConditionalGeneration(config)
        torch.nn.init.normal_(model.model.language_model.layers[0].linear_attn.conv1d.weight, std=0.5)
    elif kind == "gpt_oss":
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 6}
        model = GptOssForCausalLM(GptOssConfig(**sizes, **experts))
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                torch.nn.init.normal_(parameter)
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    else:
        model = MistralForCausalLM(MistralConfig(**sizes, sliding_window=6))
    model.save_pretrained(path)
    return path
