"""``[actor] recompute``: what the backward pass computes again from its input instead of keeping all of it.

"none", "full" (whole layers), or a list of Megatron-Core 0.16.1's ``recompute_modules``, parts of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from megarl.errors import nearest

MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
# of ``[megatron]``: other ways to say what ``[actor] recompute`` says
OWNED = ("recompute_granularity", "recompute_modules", "moe_layer_recompute")


def _known(value: str | tuple[str, ...]) -> str | tuple[str, ...]:
    if value in ("none", "full"):
        return value
    if isinstance(value, str):
        raise ValueError(f"{value!r} is neither 'none' nor 'full' nor a list of {', '.join(MODULES)}")
    for name in value:
        if name not in MODULES:
            close = nearest(name, MODULES)
            hint = f"did you mean {close!r}? " if close else ""
            raise ValueError(f"{name!r} is no part of a layer; {hint}known are {', '.join(MODULES)}")
    if not value or len(set(value)) < len(value):
        raise ValueError("name each part of a layer once, or use 'none'")
    return value


Setting = Annotated[str | Annotated[tuple[str, ...], Field(strict=False)], AfterValidator(_known)]


@dataclass(frozen=True)
class Recompute:
    """Effective setting of a recipe."""

    modules: frozenset[str] = frozenset()  # parts of every layer
    whole: bool = False  # whole layers:
    method: str = "uniform"  # "block": the first ``layers`` of a model chunk, "uniform": all, ``layers`` at a time
    layers: int = 1

    @classmethod
    def of(cls, setting: str | Sequence[str], megatron: dict[str, Any]) -> Recompute:
        """Of ``[actor] recompute`` and what ``[megatron]`` says of it."""
        if setting == "none":
            return cls()
        if setting == "full":
            method, layers = megatron.get("recompute_method", "uniform"), megatron.get("recompute_num_layers", 1)
            return cls(whole=True, method=method, layers=layers)
        return cls(modules=frozenset(setting))

    def megatron_settings(self) -> dict[str, Any]:
        """Fields of Megatron's TransformerConfig."""
        if self.whole:
            return dict(recompute_granularity="full", recompute_method=self.method, recompute_num_layers=self.layers)
        if self.modules:
            return dict(recompute_granularity="selective", recompute_modules=sorted(self.modules))
        return {}

    def again(self, layers: int) -> int:
        """How many of a chunk's ``layers`` are repeated whole."""
        if not self.whole:
            return 0
        return min(layers, self.layers) if self.method == "block" else layers
