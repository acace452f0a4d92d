"""``[actor.lora]``: low-rank adapters beside the actor's matrices, which then stay as they are."""

from __future__ import annotations

from pydantic import Field

from megarl.recipe.base import Table


class LoraTable(Table):
    rank: int = Field(32, ge=1, le=10**5)  # of every adapter; that of q, k and v, or of gate and up, is one
    alpha: float = Field(32.0, gt=0, le=10**6)  # an adapter is scaled by alpha / rank
    # Megatron's names of matrices in a layer, or how they end: "experts.linear_fc1" is of routed experts alone
    targets: tuple[str, ...] = Field(
        ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"), strict=False, min_length=1
    )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank
