"""What megarl must know of a model family.

A layer has two halves, attention and feed-forward, each with the norm before it. A family names one of each; a family
with another kind of attention or feed-forward brings a class with the methods below.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from megarl.models.tensors import LM_HEAD, OUTSIDE_LAYERS, TensorNames
from megarl.recipe.layout import Layout

Hf = dict[str, Any]  # the settings of a model, as `megarl.models.hf_config.read_hf_config` returns them


class Kept(NamedTuple):
    """What one layer keeps for the backward pass, on one rank."""

    elements: float  # of the type of the activations
    float32: float  # elements that are float32 whatever that type is


class Half(Protocol):
    """What both halves of a layer say of themselves."""

    def problems(self, hf: Hf) -> Iterator[str]:
        """Settings of config.json that megarl would not compute, each as the message for the user."""

    def megatron_settings(self, hf: Hf) -> dict[str, Any]:
        """Fields of Megatron's TransformerConfig that follow from the model alone."""

    def tensors(self, hf: Hf) -> dict[str, TensorNames]:
        """The tensors of a layer, by the names that Megatron's torch-native modules give their parameters."""


class Attention(Half, Protocol):
    """Beside that of every `Half`: the sizes of an attention."""

    def kept(self, hf: Hf, layout: Layout, tokens: int) -> Kept:
        """For a micro-batch of ``tokens``, without recompute."""

    def cached_elements(self, hf: Hf, tensor_parallel: int) -> int:
        """What the KV cache of one GPU holds of a token and layer."""

    def flops(self, hf: Hf, length: float) -> float:
        """Of causal attention over one sequence in one layer, projections left out."""


class FeedForward(Half, Protocol):
    """Beside that of every `Half`: the sizes of a feed-forward part."""

    def kept(self, hf: Hf, layout: Layout, tokens: int, imbalance: float) -> Kept:
        """``imbalance``: tokens of the fullest expert rank over the mean."""

    def expert_parameters(self, hf: Hf) -> int:
        """Of one expert of one layer; 0 in a dense model."""


@dataclass(frozen=True)
class Family:
    """The kinds of model that share a ``model_type``: all layers alike, RMSNorm, rotary positions."""

    attention: Attention
    feed_forward: FeedForward

    def problems(self, hf: Hf) -> Iterator[str]:
        """Every setting for which `read_hf_config` refuses the model, as the message for the user."""
        yield from self.attention.problems(hf)
        yield from self.feed_forward.problems(hf)

    def megatron_settings(self, hf: Hf) -> dict[str, Any]:
        """Fields of Megatron's TransformerConfig that follow from the model alone."""
        whole = dict(
            num_layers=hf["num_hidden_layers"],
            hidden_size=hf["hidden_size"],
            layernorm_epsilon=hf["rms_norm_eps"],
            normalization="RMSNorm",
            add_bias_linear=False,
        )
        return whole | self.attention.megatron_settings(hf) | self.feed_forward.megatron_settings(hf)

    def layer_tensors(self, hf: Hf) -> dict[str, TensorNames]:
        """The tensors of a layer, by the names that Megatron's torch-native modules give their parameters."""
        return self.attention.tensors(hf) | self.feed_forward.tensors(hf)

    def tensor_names(self, hf: Hf) -> set[str]:
        """Every tensor of the whole model, with one for each expert; a tied model has no `LM_HEAD`."""
        names = {name for tensors in OUTSIDE_LAYERS.values() for name in tensors.names}
        if hf.get("tie_word_embeddings"):
            names.remove(LM_HEAD)
        layer = [name for tensors in self.layer_tensors(hf).values() for name in tensors.names]
        each = [name.format(e) for name in layer for e in (range(hf["num_experts"]) if "{}" in name else [0])]
        return names | {f"model.layers.{i}.{name}" for i in range(hf["num_hidden_layers"]) for name in each}

    def kept(self, hf: Hf, layout: Layout, tokens: int, imbalance: float = 1.0) -> Kept:
        """Of one layer, for a micro-batch of ``tokens``, without recompute."""
        norms = 4 * tokens_between(layout, tokens) * hf["hidden_size"]  # input and output of both
        attention = self.attention.kept(hf, layout, tokens)
        feed_forward = self.feed_forward.kept(hf, layout, tokens, imbalance)
        return Kept(norms + attention.elements + feed_forward.elements, attention.float32 + feed_forward.float32)


def tokens_inside(layout: Layout, tokens: int) -> float:
    """Tokens that a rank has inside attention and MLP."""
    return tokens / layout.context_parallel


def tokens_between(layout: Layout, tokens: int) -> float:
    """Tokens that a rank has between attention and MLP, under sequence parallelism."""
    return tokens_inside(layout, tokens) / layout.tensor_parallel
