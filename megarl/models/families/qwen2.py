"""Qwen2, Qwen2.5 and DeepSeek-R1-Distill-Qwen: query, key and value have biases, which config.json does not mention."""

from megarl.models.attention import GroupedQueryAttention
from megarl.models.family import Family
from megarl.models.feed_forward import GatedMlp

FAMILY = Family(GroupedQueryAttention(qkv_bias=True), GatedMlp())
