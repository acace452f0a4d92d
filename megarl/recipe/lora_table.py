"""``[actor.lora]``: train low-rank adapters beside the actor's matrices, which stay frozen."""

from __future__ import annotations

from pydantic import Field

from megarl.recipe.base import Table


class LoraTable(Table):
    rank: int = Field(32, ge=1, le=10**5)  # of every adapter; q, k and v share one adapter, and so do gate and up
    alpha: float = Field(32.0, gt=0, le=10**6)  # an adapter's output is scaled by alpha / rank
    # Megatron's names of a layer's matrices, or the ends of names: "experts.linear_fc1" is that of routed experts only
    targets: tuple[str, ...] = Field(
        ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"), strict=False, min_length=1
    )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank
