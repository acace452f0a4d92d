"""Bytes of activations in an update, by formulas that the tests compare with the tensors that autograd saves."""

from __future__ import annotations

import math
from typing import Any

from megarl.models import family_of
from megarl.models.family import Keeping
from megarl.planner.parameter_counts import StageParameters
from megarl.recipe.actor_table import Recompute
from megarl.recipe.layout import Layout
from megarl.recipe.megatron import SCALINGS, scaling_of
from megarl.recipe.tables import Recipe


def keeping(recipe: Recipe) -> Keeping:
    """What the recipe's layers keep for their backward pass; with layers = "auto" the torch-native ones are assumed."""
    scaling = scaling_of(recipe.megatron)
    fused = scaling is not None or recipe.actor.layers == "transformer_engine"
    return Keeping(Recompute.of(recipe.actor.recompute, recipe.megatron).modules, fused, scaling)


def layer_bytes(
    hf: dict[str, Any],
    layout: Layout,
    tokens: int,
    imbalance: float = 1.0,
    width: int = 2,
    dense: bool = False,
    linear: bool = False,
    how: Keeping | None = None,
) -> float:
    """Bytes that one layer keeps for the backward pass of a micro-batch of ``tokens``, on one rank.

    Args:
        imbalance: tokens of the fullest expert rank over the mean.
        width: bytes of an activation.
        dense: whether it is a layer without experts in a model that has experts in other layers.
        linear: whether it is a layer that has a state instead of keys and values.
        how: which parts are recomputed, and the kind of layers; None: nothing is recomputed, torch-native layers.
    """
    kept = family_of(hf).kept(hf, layout, tokens, imbalance, dense, linear, how)
    of_input = width if how is None or how.fp8 is None else SCALINGS[how.fp8].input
    return width * kept.elements + 4 * kept.float32 + of_input * kept.inputs


def all_layers_bytes(
    hf: dict[str, Any],
    layout: Layout,
    tokens: int,
    counts: StageParameters,
    imbalance: float,
    how: Keeping | None = None,
) -> tuple[float, float]:
    """Bytes that all layers of a pipeline stage keep of a micro-batch, and those of the layer that keeps most."""

    def of_kind(dense: bool, linear: bool) -> float:
        return layer_bytes(hf, layout, tokens, imbalance, dense=dense, linear=linear, how=how)

    def kinds(count: int) -> list[bool]:
        return [*([False] if count < counts.layers else []), *([True] if count else [])]

    usual = of_kind(False, False)
    kept = counts.layers * usual + counts.dense_layers * (of_kind(True, False) - usual)
    kept += counts.linear_layers * (of_kind(False, True) - usual)
    return kept, max(of_kind(d, n) for d in kinds(counts.dense_layers) for n in kinds(counts.linear_layers))


def micro_batches_in_flight(layout: Layout, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a pipeline stage holds at its peak.

    With virtual stages a model chunk of a micro-batch counts as its share of one.
    """
    if layout.virtual_stages == 1:
        return min(micro_batches, layout.pipeline_parallel - stage)
    chunks = 2 * (layout.pipeline_parallel - stage - 1) + (layout.virtual_stages - 1) * layout.pipeline_parallel + 1
    return min(micro_batches * layout.virtual_stages, chunks) / layout.virtual_stages


def hidden_bytes(hf: dict[str, Any], layout: Layout, tokens: int) -> float:
    """Bytes of the hidden states between two layers, on one rank."""
    return 2.0 * tokens / (layout.context_parallel * layout.tensor_parallel) * hf["hidden_size"]


def kept_bytes(
    hf: dict[str, Any], recipe: Recipe, layout: Layout, counts: StageParameters, tokens: int, imbalance: float
) -> tuple[float, float]:
    """(bytes that the layers of a pipeline stage keep of a micro-batch, most bytes that they hold in addition).

    The second are of the one layer that is in its backward pass: the activations that it has recomputed, and the
    gradients of its activations.
    """
    again, how = Recompute.of(recipe.actor.recompute, recipe.megatron), keeping(recipe)
    whole = Keeping(fused=how.fused, fp8=how.fp8)
    all_kept, largest = all_layers_bytes(hf, layout, tokens, counts, imbalance, whole)
    if again.whole:
        chunk = math.ceil(counts.layers / layout.virtual_stages)
        repeated = again.again(chunk)
        together = min(again.layers, chunk) if again.method == "uniform" else 1
        inputs = layout.virtual_stages * math.ceil(repeated / together)
        kept = inputs * hidden_bytes(hf, layout, tokens) + (chunk - repeated) / chunk * all_kept
        return kept, (1 + together * (repeated > 0)) * largest
    kept, of_largest = all_layers_bytes(hf, layout, tokens, counts, imbalance, how)
    return kept, (largest - of_largest) + largest


def stage_bytes(
    hf: dict[str, Any],
    recipe: Recipe,
    layout: Layout,
    stage: int,
    counts: StageParameters,
    tokens: int,
    in_flight: float,
    imbalance: float,
) -> float:
    """Bytes of activations of a pipeline stage at its peak, with ``in_flight`` micro-batches of ``tokens``."""
    kept, beside = kept_bytes(hf, recipe, layout, counts, tokens, imbalance)
    hidden, virtual = hidden_bytes(hf, layout, tokens), layout.virtual_stages
    # Megatron's schedules keep the output that a model chunk has sent to the next; the last chunk ends with a norm
    last = stage == layout.pipeline_parallel - 1
    sent = virtual - last
    return in_flight * (kept + sent * hidden) + beside + last * hidden


def repeated_share(hf: dict[str, Any], recipe: Recipe, layout: Layout, forward: float, length: float) -> float:
    """Share of the operations of a forward pass that the backward pass repeats.

    forward: operations of a forward pass over a sequence of ``length`` tokens.
    """
    again = Recompute.of(recipe.actor.recompute, recipe.megatron)
    if again.whole:
        chunk = max(map(len, layout.chunks(hf["num_hidden_layers"])))
        return again.again(chunk) / chunk
    return family_of(hf).repeated_flops(hf, length, again.modules) / forward
