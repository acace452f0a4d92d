"""The interface of a model family: settings, tensor names, and the memory and arithmetic that `megarl plan` counts.

A layer has two sublayers, attention and feed-forward, each with the norm before it. A family names one class for each,
and may name a second feed-forward for layers without experts and a linear attention. A new kind of sublayer is a class
with the methods of the protocols below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from megarl.models.tensors import LM_HEAD, TensorNames
from megarl.recipe.layout import Layout

Hf = dict[str, Any]  # the settings of a model, as `megarl.models.hf_config.read_hf_config` returns them


class Sublayer(Protocol):
    """What both sublayers of a layer have. A class that derives from it or from the protocols below defines the methods
    that only have a docstring here, and inherits the others."""

    def problems(self, hf: Hf) -> Iterator[str]:
        """A message for each setting of config.json that megarl does not support."""

    def megatron_settings(self, hf: Hf) -> dict[str, Any]:
        """Fields of Megatron's TransformerConfig that follow from the model alone."""

    def tensors(self, hf: Hf) -> dict[str, TensorNames]:
        """The tensors of this sublayer, by the parameters' names in Megatron's torch-native modules."""

    def divided(self, hf: Hf) -> dict[str, int]:
        """{setting: its value} for each setting whose value ``tensor_parallel`` must divide."""


class Attention(Sublayer, Protocol):
    """The first sublayer: softmax attention, or linear attention, whose state takes the place of keys and values."""

    rope_types: tuple[str, ...] = ()  # the supported values of ``rope_type`` in config.json
    partial_rotary: bool = False  # whether config.json may ask that only a part of each head is rotated

    def kept(self, hf: Hf, layout: Layout) -> float:
        """Elements of two bytes that a token's backward pass needs of one layer, beside the normalised input.

        At most, and over all tensor-parallel ranks.
        """

    def flops(self, hf: Hf, length: float) -> float:
        """Operations of a forward pass over one sequence of ``length`` tokens in one layer, without projections; those
        of windows count as whole, and those of linear attention not at all."""
        return 0.0

    @property
    def norms_all_heads(self) -> bool:
        """Whether the norm of queries and keys, if there is one, is over all heads of a token."""
        return False

    def window(self, hf: Hf, layer: int) -> int | None:
        """Number of tokens, itself included, that a token attends to in layer ``layer`` (from 0); None: no window."""
        return None

    def cached_elements(self, hf: Hf, tensor_parallel: int) -> int:
        """Elements of the KV cache of one GPU for one token in one layer."""
        return 0

    def state_elements(self, hf: Hf, tensor_parallel: int) -> float:
        """Elements of the state of one response in one layer on one GPU, whatever the response's length."""
        return 0.0


class FeedForward(Sublayer, Protocol):
    """The second sublayer: a dense feed-forward network or a mixture of experts."""

    undivided: bool  # whether expert tensor parallelism is impossible: no routed expert may be divided between ranks

    def kept(self, hf: Hf, layout: Layout, imbalance: float, again: frozenset[str]) -> float:
        """As `Attention.kept`.

        imbalance: routed tokens of the fullest expert-parallel rank over the ranks' mean. again: parts whose forward
        pass is recomputed.
        """

    def repeated_width(self, hf: Hf, again: frozenset[str]) -> int:
        """Width of the SwiGLUs that a token computes again. again: as in `kept`."""


Sublayers = tuple[Attention, FeedForward]


@dataclass(frozen=True)
class Family:
    """The models that share a Hugging Face ``model_type``; all have RMSNorm before each sublayer and rotary positions.

    dense: the feed-forward of layers without experts, if the family may mix these with layers with experts.
    linear: the first sublayer of layers with linear attention, if the family may have them.
    aliases: {megarl's name of a setting: the family's name of it in config.json}.
    defaults: transformers' defaults of settings that change the model, for when config.json leaves them out.
    only: {setting: the only supported value}; megarl ignores the setting, so any other value is refused.
    zero_centred_norms: norms multiply by their weight plus one.
    copied: prefixes of names of tensors that every export copies unchanged from the base model.
    prefix: prefix of the names of all tensors but `LM_HEAD`.
    nested: the setting of config.json that holds the language model's settings, if the model has other parts too.
    """

    attention: Attention
    feed_forward: FeedForward
    dense: FeedForward | None = None
    linear: Attention | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    zero_centred_norms: bool = False
    copied: tuple[str, ...] = ()
    prefix: str = "model."
    nested: str | None = None

    @property
    def embedding(self) -> str:
        """The name of the input embedding's tensor."""
        return f"{self.prefix}embed_tokens.weight"

    def outside_layers(self) -> dict[str, TensorNames]:
        """The tensors outside the layers, by the names of Megatron's parameters."""
        return {
            "embedding.word_embeddings.weight": TensorNames((self.embedding,), 0),
            "decoder.final_layernorm.weight": TensorNames((f"{self.prefix}norm.weight",)),
            "output_layer.weight": TensorNames((LM_HEAD,), 0),
        }

    def uniform(self, hf: Hf) -> Hf:
        """The settings of config.json with the family's defaults; those in ``aliases`` also under megarl's names."""
        hf = dict(self.defaults) | hf
        return hf | {ours: hf[theirs] for ours, theirs in self.aliases.items() if theirs in hf}

    def has_experts(self, hf: Hf, layer: int) -> bool:
        """Whether the feed-forward of layer ``layer`` (from 0) is a mixture of experts.

        In families with dense layers: those that ``feed_forwards``, an alias, calls sparse, or without it after
        ``first_k_dense_replace`` layers every ``decoder_sparse_step``-th that is not in ``mlp_only_layers``.
        """
        if self.dense is None:
            return bool(hf["num_experts"])
        if types := hf.get("feed_forwards"):
            return bool(types[layer] == "sparse")
        first, step = hf.get("first_k_dense_replace", 0), hf.get("decoder_sparse_step", 1)
        chosen = layer >= first and (layer + 1) % step == 0
        return bool(hf["num_experts"]) and chosen and layer not in (hf.get("mlp_only_layers") or ())

    def is_linear(self, hf: Hf, layer: int) -> bool:
        """Whether layer ``layer`` (from 0) has linear attention."""
        if self.linear is None:
            return False
        if types := hf.get("layer_types"):
            return bool(types[layer] == "linear_attention")
        return (layer + 1) % int(hf["full_attention_interval"]) != 0

    def linear_layers(self, hf: Hf) -> int:
        """Number of layers with linear attention."""
        return sum(self.is_linear(hf, layer) for layer in range(hf["num_hidden_layers"]))

    def window(self, hf: Hf, layer: int) -> int | None:
        """`Attention.window` of layer ``layer`` (from 0); None also for a layer with linear attention."""
        return None if self.is_linear(hf, layer) else self.attention.window(hf, layer)

    def context_divided(self, hf: Hf) -> dict[str, int]:
        """{setting: its value} for each setting whose value ``tensor_parallel * context_parallel`` must divide: those
        of linear attention, for whose heads context-parallel ranks exchange parts of sequences."""
        return self.linear.divided(hf) if self.linear and self.linear_layers(hf) else {}

    def sublayers(self, hf: Hf, layer: int) -> Sublayers:
        """The two sublayers of layer ``layer`` (from 0)."""
        linear, dense = self.linear, None if self.has_experts(hf, layer) else self.dense
        return (linear if linear and self.is_linear(hf, layer) else self.attention), dense or self.feed_forward

    def distinct_sublayers(self, hf: Hf) -> list[Sublayer]:
        """The sublayers that occur in a model: those of softmax attention and of experts first, where there are any."""
        there = {
            self.attention,
            *(part for layer in range(hf["num_hidden_layers"]) for part in self.sublayers(hf, layer)),
        }
        order = (self.attention, self.linear, self.feed_forward, self.dense)
        return [part for part in order if part in there]

    def problems(self, hf: Hf) -> Iterator[str]:
        """A message for each setting that megarl does not support; `read_hf_config` then refuses the model."""
        for name, only in self.only.items():
            if hf.get(name, only) != only:
                yield f"{name} = {hf[name]!r} is not supported for {hf['model_type']}, only {only!r}"
        types = hf.get("feed_forwards")
        if types and (len(types) != hf["num_hidden_layers"] or set(types) - {"dense", "sparse"}):
            yield f"{self.aliases['feed_forwards']} = {types!r} must name dense or sparse for each of the layers"
        for part in self.distinct_sublayers(hf):
            yield from part.problems(hf)

    def divided(self, hf: Hf) -> dict[str, int]:
        """`Sublayer.divided` of all sublayers."""
        return {name: size for part in self.distinct_sublayers(hf) for name, size in part.divided(hf).items()}

    def megatron_settings(self, hf: Hf) -> dict[str, Any]:
        """Fields of Megatron's TransformerConfig that follow from the model alone."""
        settings = dict(
            num_layers=hf["num_hidden_layers"],
            hidden_size=hf["hidden_size"],
            layernorm_epsilon=hf["rms_norm_eps"],
            normalization="RMSNorm",
            layernorm_zero_centered_gamma=self.zero_centred_norms,
            add_bias_linear=False,
        )
        for part in self.distinct_sublayers(hf):
            settings |= part.megatron_settings(hf)
        sparse = [int(self.has_experts(hf, layer)) for layer in range(hf["num_hidden_layers"])]
        if 0 < sum(sparse) < len(sparse):
            settings["moe_layer_freq"] = sparse
        if self.linear_layers(hf):
            settings["linear_attention_freq"] = [int(self.is_linear(hf, i)) for i in range(hf["num_hidden_layers"])]
        return settings

    def layer_tensors(self, hf: Hf, layer: int) -> dict[str, TensorNames]:
        """The tensors of a layer, by the names that Megatron's torch-native modules give their parameters."""
        mixer, feed_forward = self.sublayers(hf, layer)
        return mixer.tensors(hf) | feed_forward.tensors(hf)

    def tensor_names(self, hf: Hf) -> set[str]:
        """The names of all tensors of the model, each expert's included; with tied embeddings there is no `LM_HEAD`."""
        names = {name for tensors in self.outside_layers().values() for name in tensors.names}
        if hf.get("tie_word_embeddings"):
            names.remove(LM_HEAD)
        for layer in range(hf["num_hidden_layers"]):
            of_layer = [name for tensors in self.layer_tensors(hf, layer).values() for name in tensors.names]
            each = [name.format(e) for name in of_layer for e in (range(hf["num_experts"]) if "{}" in name else [0])]
            names |= {f"{self.prefix}layers.{layer}.{name}" for name in each}
        return names

    def copies(self, hf: Hf, name: str) -> bool:
        """Whether every export copies a tensor unchanged from the base model: those in ``copied``, and layers for
        multi-token prediction, which come after the model's own layers."""
        first = hf["num_hidden_layers"]
        extra = range(first, first + (hf.get("num_nextn_predict_layers") or 0))
        return name.startswith((*self.copied, *(f"{self.prefix}layers.{layer}." for layer in extra)))

    def kept(self, hf: Hf, layout: Layout, layer: int, imbalance: float, again: frozenset[str]) -> float:
        """Elements of two bytes that a token's backward pass needs of layer ``layer`` (from 0).

        At most, over all tensor-parallel ranks, with torch-native layers. Arguments: as in `FeedForward.kept`.
        """
        mixer, feed_forward = self.sublayers(hf, layer)
        # of both norms the input, in float32 if they compute in it, one statistic, and the output
        norms = 2 + 2 * self.zero_centred_norms + 2 * ("layernorm" not in again)
        kept = mixer.kept(hf, layout) + feed_forward.kept(hf, layout, imbalance, again)
        return norms * float(hf["hidden_size"]) + 4 + kept

    def mixing_flops(self, hf: Hf, length: float) -> float:
        """`Attention.flops` summed over all layers."""
        return sum(self.sublayers(hf, layer)[0].flops(hf, length) for layer in range(hf["num_hidden_layers"]))

    def cached_elements(self, hf: Hf, tensor_parallel: int) -> int:
        """Elements of the KV cache of one GPU for one token, in all layers that cache every token."""
        layers = [layer for layer in range(hf["num_hidden_layers"]) if self.window(hf, layer) is None]
        return sum(self.sublayers(hf, layer)[0].cached_elements(hf, tensor_parallel) for layer in layers)

    def state_elements(self, hf: Hf, tensor_parallel: int) -> float:
        """Further cache elements of one GPU for one response, whatever its length: the states of linear attention, and
        the full windows of layers with windows."""
        states = 0.0
        for layer in range(hf["num_hidden_layers"]):
            mixer, window = self.sublayers(hf, layer)[0], self.window(hf, layer) or 0
            states += mixer.state_elements(hf, tensor_parallel)
            states += window * mixer.cached_elements(hf, tensor_parallel)
        return states
