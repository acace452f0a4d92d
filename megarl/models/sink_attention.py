"""Attention of gpt-oss: each head has a sink, some layers have windows, and every projection has a bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megarl.models.attention import GroupedQueryAttention
from megarl.models.family import Hf
from megarl.models.tensors import TensorNames

_TYPES = ("sliding_attention", "full_attention")  # as config.json calls them


@dataclass(frozen=True)
class SinkAttention(GroupedQueryAttention):
    """The softmax of a head includes one more logit, a parameter, without a value (OpenAI 2025, arXiv 2508.10925).

    In layers with a window a token attends to the last ``sliding_window`` tokens, itself included.
    """

    qkv_bias: bool = True
    rope_types: tuple[str, ...] = ("default", "yarn")

    @property
    def torch_layers_only(self) -> bool:
        return True

    def problems(self, hf: Hf) -> Iterator[str]:
        yield from super().problems(hf)
        types = hf.get("layer_types")
        if types is not None and (len(types) != hf["num_hidden_layers"] or set(types) - set(_TYPES)):
            yield f"layer_types = {types!r} must name one of {', '.join(_TYPES)} for each of the layers"

        if hf["sliding_window"] is not None and hf["sliding_window"] < 1:
            yield f"sliding_window = {hf['sliding_window']} must be 1 or more"

    def window(self, hf: Hf, layer: int) -> int | None:
        types = hf.get("layer_types")
        kind = types[layer] if types is not None else _TYPES[layer % 2]
        return int(hf["sliding_window"]) if kind == _TYPES[0] and hf["sliding_window"] is not None else None

    def megatron_settings(self, hf: Hf) -> dict[str, Any]:
        settings = super().megatron_settings(hf) | dict(add_bias_linear=True, softmax_type="learnable")
        windows = [self.window(hf, layer) for layer in range(hf["num_hidden_layers"])]
        if any(windows):
            settings |= dict(
                window_size=(hf["sliding_window"] - 1, 0), window_attn_skip_freq=[int(bool(w)) for w in windows]
            )
        return settings

    def tensors(self, hf: Hf) -> dict[str, TensorNames]:
        return super().tensors(hf) | {
            "self_attention.linear_proj.bias": TensorNames(("self_attn.o_proj.bias",)),
            "self_attention.core_attention.softmax_offset": TensorNames(("self_attn.sinks",), 0),
        }
