"""OLMoE: queries and keys are normalised over all heads together."""

from megarl.models.attention import GroupedQueryAttention
from megarl.models.family import Family
from megarl.models.feed_forward import MixtureOfExperts

FAMILY = Family(
    GroupedQueryAttention(qk_norm="all heads"),
    MixtureOfExperts(),
    aliases={"moe_intermediate_size": "intermediate_size"},
    defaults={"norm_topk_prob": False},
    only={"clip_qkv": None},
)
