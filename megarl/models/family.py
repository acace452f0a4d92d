"""What megarl must know of a model family.

A layer has two halves, attention and feed-forward, each with the norm before it. A family names one of each, and a
second feed-forward for layers without experts; a family with another kind of attention or feed-forward brings a class
with the methods below.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from megarl.models.tensors import LM_HEAD, TensorNames
from megarl.recipe.layout import Layout

Hf = dict[str, Any]  # the settings of a model, as `megarl.models.hf_config.read_hf_config` returns them


class Kept(NamedTuple):
    """What one layer keeps for the backward pass, on one rank."""

    elements: float  # of the type of the activations
    float32: float  # elements of four bytes whatever that type is
    inputs: float = 0.0  # further elements, kept as inputs of matrices alone: these may be in 8 bits


@dataclass(frozen=True)
class Keeping:
    """How layers keep it."""

    again: frozenset[str] = frozenset()  # `megarl.recipe.recompute`: parts that keep their input alone
    fused: bool = False  # Transformer Engine's layers instead of the torch-native ones
    fp8: str | None = None  # how their matrices are scaled, `megarl.recipe.fp8`
    widened: bool = False  # norms compute in float32, and so keep what goes into them


class Half(Protocol):
    """What both halves of a layer say of themselves."""

    def problems(self, hf: Hf) -> Iterator[str]:
        """Settings of config.json that megarl would not compute, each as the message for the user."""

    def megatron_settings(self, hf: Hf) -> dict[str, Any]:
        """Fields of Megatron's TransformerConfig that follow from the model alone."""

    def tensors(self, hf: Hf) -> dict[str, TensorNames]:
        """The tensors of a layer, by the names that Megatron's torch-native modules give their parameters."""

    def divided(self, hf: Hf) -> dict[str, int]:
        """{setting: its value} of those that ``tensor_parallel`` must divide."""


class TokenMixer(Half, Protocol):
    """Beside that of every `Half`: the sizes of what lets a token see those before it."""

    def kept(self, hf: Hf, layout: Layout, tokens: int, how: Keeping) -> Kept:
        """For a micro-batch of ``tokens``, its normalised input among it."""

    def flops(self, hf: Hf, length: float) -> float:
        """Of one sequence in one layer, projections left out."""

    def repeated_flops(self, hf: Hf, length: float, again: frozenset[str]) -> float:
        """Of `flops`, those of parts whose forward pass is repeated."""


class Attention(TokenMixer, Protocol):
    """Beside that of every `Half`: the sizes of an attention, and its rotary positions."""

    @property
    def rope_types(self) -> tuple[str, ...]:
        """Those that are supported, as config.json calls them."""

    @property
    def partial_rotary(self) -> bool:
        """Whether a part of each head may stay unrotated."""

    @property
    def norms_all_heads(self) -> bool:
        """Whether the norm of queries and keys, where there is one, is over all heads of a token."""

    @property
    def torch_layers_alone(self) -> bool:
        """Whether Transformer Engine's layers lack this attention, or have never been compared with it."""

    def window(self, hf: Hf, layer: int) -> int | None:
        """To how many tokens one attends in layer ``layer``, from 0; None: to all before it."""

    def cached_elements(self, hf: Hf, tensor_parallel: int) -> int:
        """What the KV cache of one GPU holds of a token and layer."""


class LinearAttention(TokenMixer, Protocol):
    """Beside that of every `TokenMixer`: the state that takes the place of keys and values."""

    def state_elements(self, hf: Hf, tensor_parallel: int) -> float:
        """What one GPU holds of a running response and layer, however long the response is."""

    def context_divided(self, hf: Hf) -> dict[str, int]:
        """{setting: its value} of those that ``tensor_parallel * context_parallel`` must divide."""


class FeedForward(Half, Protocol):
    """Beside that of every `Half`: the sizes of a feed-forward part."""

    @property
    def undivided(self) -> bool:
        """Whether no routed expert may be divided between ranks."""

    def kept(self, hf: Hf, layout: Layout, tokens: int, imbalance: float, how: Keeping) -> Kept:
        """Likewise. ``imbalance``: tokens of the fullest expert rank over the mean."""

    def expert_parameters(self, hf: Hf) -> int:
        """Of one routed expert of one layer; 0 in a dense model."""

    def repeated_parameters(self, hf: Hf, again: frozenset[str]) -> int:
        """Parameters that a token uses in parts whose forward pass is repeated."""


@dataclass(frozen=True)
class Family:
    """The kinds of model that share a ``model_type``: RMSNorm, rotary positions, all layers alike but for the experts.

    dense: the feed-forward half of layers without experts, in a family that may have such beside layers with experts.
    linear: the first half of layers that have a state in the place of keys and values, if a family has such.
    aliases: {megarl's name of a setting: the family's}.
    defaults: what transformers takes for settings that config.json leaves out, where they change the model.
    only: settings that must have this value where they are there: another would be computed as this one.
    zero_centred_norms: norms multiply by one more than their weight.
    copied: prefixes of tensors that are copied into every export as they are.
    prefix: of all tensors but `LM_HEAD`.
    nested: the setting of config.json that holds those of the language model, in a family that has others too.
    quantised: the ``quant_method`` of weights that are converted to bfloat16 when a run copies its model.
    """

    attention: Attention
    feed_forward: FeedForward
    dense: FeedForward | None = None
    linear: LinearAttention | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    zero_centred_norms: bool = False
    copied: tuple[str, ...] = ()
    prefix: str = "model."
    nested: str | None = None
    quantised: tuple[str, ...] = ()

    @property
    def embedding(self) -> str:
        """The tensor of the input embedding."""
        return f"{self.prefix}embed_tokens.weight"

    def outside_layers(self) -> dict[str, TensorNames]:
        """The tensors that are in no layer, by Megatron's names."""
        return {
            "embedding.word_embeddings.weight": TensorNames((self.embedding,), 0),
            "decoder.final_layernorm.weight": TensorNames((f"{self.prefix}norm.weight",)),
            "output_layer.weight": TensorNames((LM_HEAD,), 0),
        }

    def uniform(self, hf: Hf) -> Hf:
        """The settings of config.json with the family's defaults, also under megarl's names."""
        hf = dict(self.defaults) | hf
        return hf | {ours: hf[theirs] for ours, theirs in self.aliases.items() if theirs in hf}

    def has_experts(self, hf: Hf, layer: int) -> bool:
        """Whether the feed-forward half of layer ``layer``, from 0, is a mixture of experts."""
        return bool(hf["num_experts"])

    def sparse_layers(self, hf: Hf) -> int:
        """How many layers have experts."""
        return sum(self.has_experts(hf, layer) for layer in range(hf["num_hidden_layers"]))

    def is_linear(self, hf: Hf, layer: int) -> bool:
        """Whether layer ``layer``, from 0, has a state in the place of keys and values."""
        if self.linear is None:
            return False
        if types := hf.get("layer_types"):
            return bool(types[layer] == "linear_attention")
        return (layer + 1) % int(hf["full_attention_interval"]) != 0

    def linear_layers(self, hf: Hf) -> int:
        """How many layers have a state in the place of keys and values."""
        return sum(self.is_linear(hf, layer) for layer in range(hf["num_hidden_layers"]))

    def window(self, hf: Hf, layer: int) -> int | None:
        """To how many tokens one attends in layer ``layer``, from 0; None: to all before it, or there is a state."""
        return None if self.is_linear(hf, layer) else self.attention.window(hf, layer)

    def context_divided(self, hf: Hf) -> dict[str, int]:
        """{setting: its value} of those that ``tensor_parallel * context_parallel`` must divide."""
        return {} if self.linear is None else self.linear.context_divided(hf)

    def _mixer(self, linear: bool) -> TokenMixer:
        return self.linear if linear and self.linear is not None else self.attention

    def halves(self, hf: Hf) -> list[Half]:
        """The halves that the layers of a model are made of."""
        sparse = self.sparse_layers(hf)
        dense = [self.dense] if self.dense is not None and sparse < hf["num_hidden_layers"] else []
        linear = [self.linear] if self.linear is not None and self.linear_layers(hf) else []
        return [self.attention, *linear, *([self.feed_forward] if sparse or not dense else []), *dense]

    def problems(self, hf: Hf) -> Iterator[str]:
        """Every setting for which `read_hf_config` refuses the model, as the message for the user."""
        for name, only in self.only.items():
            if hf.get(name, only) != only:
                yield f"{name} = {hf[name]!r} is not supported for {hf['model_type']}, only {only!r}"
        for half in self.halves(hf):
            yield from half.problems(hf)

    def divided(self, hf: Hf) -> dict[str, int]:
        """{setting: its value} of those that ``tensor_parallel`` must divide."""
        return {name: size for half in self.halves(hf) for name, size in half.divided(hf).items()}

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
        for half in self.halves(hf):
            settings |= half.megatron_settings(hf)
        if 0 < self.sparse_layers(hf) < hf["num_hidden_layers"]:
            settings["moe_layer_freq"] = [int(self.has_experts(hf, i)) for i in range(hf["num_hidden_layers"])]
        if self.linear_layers(hf):
            settings["linear_attention_freq"] = [int(self.is_linear(hf, i)) for i in range(hf["num_hidden_layers"])]
        return settings

    def layer_tensors(self, hf: Hf, layer: int) -> dict[str, TensorNames]:
        """The tensors of a layer, by the names that Megatron's torch-native modules give their parameters."""
        sparse = self.dense is None or self.has_experts(hf, layer)
        found = self._mixer(self.is_linear(hf, layer)).tensors(hf)
        return found | (self.feed_forward if sparse else self.dense).tensors(hf)  # type: ignore[union-attr]

    def tensor_names(self, hf: Hf) -> set[str]:
        """Every tensor of the whole model, with one for each expert; a tied model has no `LM_HEAD`."""
        names = {name for tensors in self.outside_layers().values() for name in tensors.names}
        if hf.get("tie_word_embeddings"):
            names.remove(LM_HEAD)
        for layer in range(hf["num_hidden_layers"]):
            of_layer = [name for tensors in self.layer_tensors(hf, layer).values() for name in tensors.names]
            each = [name.format(e) for name in of_layer for e in (range(hf["num_experts"]) if "{}" in name else [0])]
            names |= {f"{self.prefix}layers.{layer}.{name}" for name in each}
        return names

    def carried(self, hf: Hf, name: str) -> bool:
        """Whether a tensor is copied into every export as it is: layers that predict more tokens than the next one."""
        first = hf["num_hidden_layers"]
        extra = range(first, first + (hf.get("num_nextn_predict_layers") or 0))
        return name.startswith((*self.copied, *(f"{self.prefix}layers.{layer}." for layer in extra)))

    def _half(self, hf: Hf, dense: bool) -> FeedForward:
        return self.dense if self.dense is not None and (dense or not hf["num_experts"]) else self.feed_forward

    def kept(
        self,
        hf: Hf,
        layout: Layout,
        tokens: int,
        imbalance: float = 1.0,
        dense: bool = False,
        linear: bool = False,
        how: Keeping | None = None,
    ) -> Kept:
        """Of one layer, for a micro-batch of ``tokens``; by default of torch-native modules without recompute.

        dense, linear: whether of one without experts, or without keys and values, in a model that has both kinds.
        """
        how = replace(how or Keeping(), widened=self.zero_centred_norms)
        both = 2 * tokens_between(layout, tokens)
        norms = both * hf["hidden_size"]  # their inputs; halves count what comes out
        if "layernorm" in how.again:
            before = Kept(norms, 0.0)
        else:
            before = Kept(0.0, norms + both) if how.widened else Kept(norms, both)  # with a number of each token
        mixer = self._mixer(linear).kept(hf, layout, tokens, how)
        half = self._half(hf, dense).kept(hf, layout, tokens, imbalance, how)
        return Kept(*map(sum, zip(before, mixer, half, strict=True)))

    def mixing_flops(self, hf: Hf, length: float) -> float:
        """Of one sequence in all layers, projections left out."""
        total = 0.0
        for layer in range(hf["num_hidden_layers"]):
            mixer, window = self._mixer(self.is_linear(hf, layer)), self.window(hf, layer)
            total += mixer.flops(hf, length)
            if window is not None and window < length:
                total -= mixer.flops(hf, length - window)  # of each token with those that have left its window
        return total

    def _windows(self, hf: Hf) -> list[int]:
        """Of all layers that have one."""
        windows = (self.window(hf, layer) for layer in range(hf["num_hidden_layers"]))
        return [window for window in windows if window is not None]

    def repeated_flops(self, hf: Hf, length: float, again: frozenset[str]) -> float:
        """Of one sequence in all layers, in parts whose forward pass is repeated."""
        total = 0.0
        for layer in range(hf["num_hidden_layers"]):
            half = self._half(hf, not self.has_experts(hf, layer))
            total += self._mixer(self.is_linear(hf, layer)).repeated_flops(hf, length, again)
            total += 2 * length * half.repeated_parameters(hf, again)
        return total

    def cached_elements(self, hf: Hf, tensor_parallel: int) -> int:
        """What the cache of one GPU holds of a token, in all layers that keep each of them."""
        layers: int = hf["num_hidden_layers"] - self.linear_layers(hf) - len(self._windows(hf))
        return layers * self.attention.cached_elements(hf, tensor_parallel)

    def state_elements(self, hf: Hf, tensor_parallel: int) -> float:
        """What the cache of one GPU holds of a response beside that, in all layers: states, and windows when full."""
        states = 0.0
        if self.linear is not None:
            states = self.linear_layers(hf) * self.linear.state_elements(hf, tensor_parallel)
        return states + sum(self._windows(hf)) * self.attention.cached_elements(hf, tensor_parallel)


@dataclass(frozen=True)
class EveryNthSparse(Family):
    """Every ``decoder_sparse_step``-th layer has experts, those in ``mlp_only_layers`` excepted."""

    def has_experts(self, hf: Hf, layer: int) -> bool:
        chosen = (layer + 1) % hf.get("decoder_sparse_step", 1) == 0
        return bool(hf["num_experts"]) and chosen and layer not in (hf.get("mlp_only_layers") or ())


@dataclass(frozen=True)
class FirstLayersDense(Family):
    """The first ``first_k_dense_replace`` layers have no experts."""

    def has_experts(self, hf: Hf, layer: int) -> bool:
        return layer >= int(hf["first_k_dense_replace"])


def tokens_inside(layout: Layout, tokens: int) -> float:
    """Tokens that a rank has inside attention and MLP."""
    return tokens / layout.context_parallel


def keys_attended_to(layout: Layout, tokens: int) -> float:
    """Tokens whose keys and values a rank has beside its queries.

    Under context parallelism those of all ranks, each chunk as often as a chunk of the rank attends to it.
    """
    if layout.context_parallel == 1:
        return tokens
    return tokens * (1 + 1 / (2 * layout.context_parallel))


def tokens_between(layout: Layout, tokens: int) -> float:
    """Tokens that a rank has between attention and MLP, under sequence parallelism."""
    return tokens_inside(layout, tokens) / layout.tensor_parallel


def normalised(hf: Hf, layout: Layout, tokens: int, how: Keeping) -> float:
    """Elements that come out of the norm before a half, where something in the half keeps them.

    Transformer Engine has the norm in the matrix after it, which ``layernorm`` does not reach.
    """
    dropped = "layernorm" in how.again and not how.fused
    return 0.0 if dropped else tokens_between(layout, tokens) * hf["hidden_size"]
