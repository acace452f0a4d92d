"""Mixtral: Llama's attention, and experts whose tensors have other names."""

from megarl.models.attention import GroupedQueryAttention
from megarl.models.family import Family
from megarl.models.feed_forward import MixtureOfExperts

FAMILY = Family(
    GroupedQueryAttention(),
    MixtureOfExperts(module="block_sparse_moe", matrices=("w1", "w3", "w2")),
    aliases={"moe_intermediate_size": "intermediate_size"},
    defaults={"rope_theta": 1e6, "norm_topk_prob": True},
    only={"sliding_window": None},
)
