"""Bytes and floating-point operations of a model, by formulas that the tests check by hand and against real models.

Bytes of an update are for the torch-native modules in bfloat16 and `kernels.linear_logprob`. What depends on the model
family comes from `megarl.models`. In all functions ``hf`` is the model's config.json and ``parameters`` the number of
all its parameters.

Activations are not measured on the actor's own model: a torch without CUDA cannot index fake CUDA tensors, and on the
meta device autograd saves other tensors than on a GPU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megarl.models import family_of
from megarl.models.family import ActivationSettings, Sublayers
from megarl.planner.assumptions import GIB
from megarl.planner.parameter_counts import StageParameters
from megarl.recipe.actor_table import Recompute
from megarl.recipe.layout import Layout
from megarl.recipe.megatron import SCALINGS, scaling_of
from megarl.recipe.tables import Recipe


@dataclass(frozen=True)
class Gpu:
    memory: float  # bytes that a process can allocate
    flops: float  # bfloat16 a second, dense, as the vendor states it
    bandwidth: float  # bytes a second of its memory
    fp8: bool = True  # whether it can multiply in 8 bits
    fp8_transposes: bool = True  # whether its 8-bit products of the backward pass need transposed copies of the weights


GPUS = {
    "a100": Gpu(79.1 * GIB, 312e12, 2.04e12, fp8=False),
    "h100": Gpu(79.1 * GIB, 989e12, 3.35e12),
    "h200": Gpu(139.8 * GIB, 989e12, 4.8e12),
    "h20": Gpu(95.1 * GIB, 148e12, 4.0e12),
    "b200": Gpu(178.3 * GIB, 2250e12, 8.0e12, fp8_transposes=False),
}


def active_parameters(hf: dict[str, Any], whole: StageParameters) -> int:
    """Parameters used by a token: all except the input embedding and the experts to which it is not routed."""
    embedding = 0 if hf.get("tie_word_embeddings") else hf["vocab_size"] * hf["hidden_size"]
    experts = hf["num_experts"] or 1
    return int(whole.dense - embedding + whole.expert // experts * hf.get("num_experts_per_tok", 0))


def touched_parameters(hf: dict[str, Any], whole: StageParameters, tokens: float) -> float:
    """Expected number of parameters that a decoding step of ``tokens`` tokens reads, with uniform routing."""
    idle = (1 - hf["num_experts_per_tok"] / hf["num_experts"]) ** tokens if hf["num_experts"] else 0.0
    return whole.dense + whole.expert * (1 - float(idle))


def forward_flops(hf: dict[str, Any], active: int, length: float) -> float:
    """Operations for one sequence of ``length`` tokens: two per active weight and token, plus those of attention."""
    return 2 * active * length + family_of(hf).mixing_flops(hf, length)


def head_bytes(hf: dict[str, Any], layout: Layout, tokens: int, gpu: Gpu, frozen: bool = False) -> float:
    """Bytes of `kernels.linear_logprob` with backend torch, in its backward pass on the last pipeline stage.

    For a chunk of tokens: logits in float32, their exponentials in float32 and their gradient in bf16. For the head,
    unless it is frozen: its gradient in float32 and in bf16. For the trained tokens: gathered hidden states and their
    gradient.
    """
    rows = math.ceil(hf["vocab_size"] / layout.tensor_parallel)
    tokens //= layout.context_parallel
    chunk = min(gpu.memory / 64, 4 * tokens * rows)  # kernels.linear_logprob.buffer_bytes
    of_head = 0 if frozen else (4 + 2) * rows * hf["hidden_size"]
    return 2.5 * chunk + of_head + 3 * 2 * tokens * hf["hidden_size"]


def hidden_bytes(hf: dict[str, Any], layout: Layout, tokens: int) -> float:
    """Bytes of the hidden states between two layers, on one rank."""
    return 2.0 * tokens / (layout.context_parallel * layout.tensor_parallel) * hf["hidden_size"]


def layer_bytes(
    hf: dict[str, Any],
    layout: Layout,
    tokens: int,
    layer: Sublayers,
    imbalance: float = 1.0,
    width: int = 2,
    settings: ActivationSettings | None = None,
) -> float:
    """Bytes that a layer saves for the backward pass of a micro-batch of ``tokens``, on one rank.

    Args:
        layer: its two sublayers, from `Family.sublayers`.
        imbalance: tokens of the fullest expert rank over the mean.
        width: bytes of an activation.
        settings: which parts are recomputed, and the kind of layers; None: nothing is recomputed, torch-native layers.
    """
    settings = settings or ActivationSettings()
    saved = family_of(hf).saved(hf, layout, tokens, layer, imbalance, settings)
    of_input = width if settings.fp8 is None else SCALINGS[settings.fp8].input
    return width * saved.elements + 4 * saved.float32 + of_input * saved.inputs


def all_layers_bytes(
    hf: dict[str, Any],
    layout: Layout,
    tokens: int,
    layers: Iterable[int],
    imbalance: float,
    settings: ActivationSettings | None = None,
) -> tuple[float, float]:
    """Bytes that ``layers``, by number from 0, save of a micro-batch, and those of the layer that saves most."""
    family = family_of(hf)
    kinds = Counter(family.sublayers(hf, layer) for layer in layers)
    saved = {kind: layer_bytes(hf, layout, tokens, kind, imbalance, settings=settings) for kind in kinds}
    return sum(count * saved[kind] for kind, count in kinds.items()), max(saved.values())


def saved_bytes(
    hf: dict[str, Any], recipe: Recipe, layout: Layout, stage: int, tokens: int, imbalance: float
) -> tuple[float, float]:
    """(bytes that the layers of a pipeline stage save of a micro-batch, most bytes that they hold in addition).

    The second are of the one layer that is in its backward pass: the activations that it has recomputed, and the
    gradients of its activations.
    """
    again, fp8 = Recompute.of(recipe.actor.recompute, recipe.megatron), scaling_of(recipe.megatron)
    fused = recipe.actor.layers == "transformer_engine"
    layers = layout.layers_of_stage(stage, hf["num_hidden_layers"])
    args = hf, layout, tokens, layers, imbalance
    all_saved, largest = all_layers_bytes(*args, ActivationSettings(fused=fused, fp8=fp8))
    if again.whole:
        chunk = math.ceil(len(layers) / layout.virtual_stages)
        repeated = again.again(chunk)
        together = min(again.layers, chunk) if again.method == "uniform" else 1
        inputs = layout.virtual_stages * math.ceil(repeated / together)
        saved = inputs * hidden_bytes(hf, layout, tokens) + (chunk - repeated) / chunk * all_saved
        return saved, (1 + together * (repeated > 0)) * largest
    saved, of_largest = all_layers_bytes(*args, ActivationSettings(again.modules, fused, fp8))
    return saved, (largest - of_largest) + largest


def stage_bytes(
    hf: dict[str, Any],
    recipe: Recipe,
    layout: Layout,
    stage: int,
    tokens: int,
    in_flight: float,
    imbalance: float,
) -> float:
    """Bytes of activations of a pipeline stage at its peak, with ``in_flight`` micro-batches of ``tokens``."""
    saved, beside = saved_bytes(hf, recipe, layout, stage, tokens, imbalance)
    hidden, virtual = hidden_bytes(hf, layout, tokens), layout.virtual_stages
    # Megatron keeps the output that a model chunk has sent to the next; the last chunk ends with a norm
    last = stage == layout.pipeline_parallel - 1
    sent = virtual - last
    return in_flight * (saved + sent * hidden) + beside + last * hidden


def micro_batches_in_flight(layout: Layout, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a pipeline stage holds at its peak.

    With virtual stages a model chunk of a micro-batch counts as its share of one.
    """
    if layout.virtual_stages == 1:
        return min(micro_batches, layout.pipeline_parallel - stage)
    chunks = 2 * (layout.pipeline_parallel - stage - 1) + (layout.virtual_stages - 1) * layout.pipeline_parallel + 1
    return min(micro_batches * layout.virtual_stages, chunks) / layout.virtual_stages


def repeated_share(hf: dict[str, Any], recipe: Recipe, layout: Layout, forward: float, length: float) -> float:
    """Share of the operations of a forward pass that the backward pass repeats.

    forward: operations of a forward pass over a sequence of ``length`` tokens.
    """
    again = Recompute.of(recipe.actor.recompute, recipe.megatron)
    if again.whole:
        chunk = max(map(len, layout.chunks(hf["num_hidden_layers"])))
        return again.again(chunk) / chunk
    return family_of(hf).repeated_flops(hf, length, again.modules) / forward
