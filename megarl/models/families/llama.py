"""Llama 3: the plain decoder."""

from megarl.models.attention import GroupedQueryAttention
from megarl.models.family import Family
from megarl.models.feed_forward import GatedMlp

FAMILY = Family(GroupedQueryAttention(), GatedMlp())
