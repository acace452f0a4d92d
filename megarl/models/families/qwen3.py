"""Qwen3: queries and keys are normalised, each head by itself."""

from megarl.models.attention import GroupedQueryAttention
from megarl.models.family import Family
from megarl.models.feed_forward import GatedMlp

FAMILY = Family(GroupedQueryAttention(qk_norm="head"), GatedMlp())
