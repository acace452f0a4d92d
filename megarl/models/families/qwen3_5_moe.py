"""Qwen3.5 MoE: not supported yet. It is Qwen3-Next's kind of model inside one that also sees images."""

REFUSAL = (
    "its config.json keeps the language model's settings in text_config, its weights stand beside those of a vision "
    "model, and its gated delta nets have one projection of all heads' queries, keys and values, of which tensor "
    "parallelism would need three slices; qwen3_next is supported"
)
