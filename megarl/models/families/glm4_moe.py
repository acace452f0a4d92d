"""GLM-4.5, 4.6 and their Air: half of each head is rotated; sigmoid routing; the first layers are dense."""

from megarl.models.attention import GroupedQueryAttention
from megarl.models.family import Family
from megarl.models.feed_forward import GatedMlp, MixtureOfExperts

FAMILY = Family(
    GroupedQueryAttention(
        qk_norm="head",
        qk_norm_if="use_qk_norm",
        qkv_bias=True,
        qkv_bias_if="attention_bias",
        partial_rotary=True,
    ),
    MixtureOfExperts(shared="mlp.shared_experts", sigmoid=True),
    dense=GatedMlp(),
    aliases={"num_experts": "n_routed_experts"},
    defaults={
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "use_qk_norm": False,
    },
)
