"""Qwen3-MoE: the attention of Qwen3, and a mixture of experts in most or all layers."""

from megarl.models.attention import GroupedQueryAttention
from megarl.models.family import Family
from megarl.models.feed_forward import GatedMlp, MixtureOfExperts

FAMILY = Family(
    GroupedQueryAttention(qk_norm="head"),
    MixtureOfExperts(),
    dense=GatedMlp(),
    defaults={"norm_topk_prob": False},
)
