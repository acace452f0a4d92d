"""``[actor] recompute``: activations that the backward pass recomputes from their input, instead of storing them.

"none", "full" (whole layers), or a list of parts of layers, which are ``recompute_modules`` of Megatron-Core 0.16.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from megarl.errors import nearest

MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
# keys of ``[megatron]`` that ``[actor] recompute`` replaces
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
            raise ValueError(f"{name!r} is not a part of a layer; {hint}known are {', '.join(MODULES)}")
    if not value or len(set(value)) < len(value):
        raise ValueError("the list must name at least one part of a layer, and none twice; or use 'none'")
    return value


Setting = Annotated[str | Annotated[tuple[str, ...], Field(strict=False)], AfterValidator(_known)]


@dataclass(frozen=True)
class Recompute:
    """What a recipe recomputes: parts of every layer (``modules``), whole layers (``whole``), or nothing."""

    modules: frozenset[str] = frozenset()
    whole: bool = False
    method: str = "uniform"  # "block": the first ``layers`` of a model chunk; "uniform": all, ``layers`` at a time
    layers: int = 1

    @classmethod
    def of(cls, setting: str | Sequence[str], megatron: dict[str, Any]) -> Recompute:
        """From ``[actor] recompute`` and, for "full", ``recompute_method`` and ``_num_layers`` of ``[megatron]``."""
        if setting == "none":
            return cls()
        if setting == "full":
            method, layers = megatron.get("recompute_method", "uniform"), megatron.get("recompute_num_layers", 1)
            return cls(whole=True, method=method, layers=layers)
        return cls(modules=frozenset(setting))

    def megatron_settings(self) -> dict[str, Any]:
        """The corresponding fields of Megatron's TransformerConfig."""
        if self.whole:
            return dict(recompute_granularity="full", recompute_method=self.method, recompute_num_layers=self.layers)
        if self.modules:
            return dict(recompute_granularity="selective", recompute_modules=sorted(self.modules))
        return {}

    def again(self, layers: int) -> int:
        """How many layers of a model chunk of ``layers`` layers are recomputed as a whole."""
        if not self.whole:
            return 0
        return min(layers, self.layers) if self.method == "block" else layers
