"""gpt-oss: attention with sinks, windows in every second layer, experts with biases and a clamped activation."""

from megarl.models.attention import SinkAttention
from megarl.models.family import Family
from megarl.models.feed_forward import ClampedExperts

FAMILY = Family(
    SinkAttention(),
    ClampedExperts(),
    aliases={"moe_intermediate_size": "intermediate_size"},
    defaults={
        "norm_topk_prob": True,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
    },
    only={"attention_bias": True, "swiglu_alpha": 1.702},
)
