"""Qwen3-MoE: the attention of Qwen3, and a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megarl.models.attention import GroupedQueryAttention
from megarl.models.family import Family
from megarl.models.feed_forward import MixtureOfExperts


class Qwen3Moe(Family):
    """Refuses models in which some layers are dense."""

    def problems(self, hf: dict[str, Any]) -> Iterator[str]:
        if hf.get("decoder_sparse_step", 1) != 1 or hf.get("mlp_only_layers"):
            yield "models that mix dense and sparse layers are not supported"
        yield from super().problems(hf)


FAMILY = Qwen3Moe(GroupedQueryAttention(qk_norm=True), MixtureOfExperts())
