"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): has a shared expert whose output is scaled by a gate."""

from megarl.models.attention import GroupedQueryAttention
from megarl.models.family import Family
from megarl.models.feed_forward import GatedMlp, MixtureOfExperts

FAMILY = Family(
    GroupedQueryAttention(qkv_bias=True),
    MixtureOfExperts(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate.weight"),
    dense=GatedMlp(),
    defaults={"norm_topk_prob": False},
    only={"qkv_bias": True},
)
