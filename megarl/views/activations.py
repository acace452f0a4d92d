"""Bytes of activations in an update, by formulas that the tests compare with the tensors that autograd saves."""

from __future__ import annotations

import math
from typing import Any

from megarl.models import family_of
from megarl.models.family import Keeping
from megarl.recipe.fp8 import SCALINGS, scaling_of
from megarl.recipe.layout import Layout
from megarl.recipe.recompute import Recompute
from megarl.recipe.tables import Recipe
from megarl.views.census import StageCensus


def keeping(recipe: Recipe) -> Keeping:
    """How the recipe's layers keep what their backward pass needs; those that "auto" chooses are torch's."""
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
    """What one layer keeps for the backward pass of a micro-batch of ``tokens``, on one rank.

    width: bytes of an activation; dense: whether of a layer that lacks the experts which others have; linear: whether
    of one that has a state in the place of keys and values.
    """
    kept = family_of(hf).kept(hf, layout, tokens, imbalance, dense, linear, how)
    of_input = width if how is None or how.fp8 is None else SCALINGS[how.fp8].input
    return width * kept.elements + 4 * kept.float32 + of_input * kept.inputs


def all_layers_bytes(
    hf: dict[str, Any], layout: Layout, tokens: int, census: StageCensus, imbalance: float, how: Keeping | None = None
) -> tuple[float, float]:
    """What all layers of a pipeline stage keep of a micro-batch, and the largest of them."""

    def of_kind(dense: bool, linear: bool) -> float:
        return layer_bytes(hf, layout, tokens, imbalance, dense=dense, linear=linear, how=how)

    def kinds(count: int) -> list[bool]:
        return [*([False] if count < census.layers else []), *([True] if count else [])]

    usual = of_kind(False, False)
    kept = census.layers * usual + census.dense_layers * (of_kind(True, False) - usual)
    kept += census.linear_layers * (of_kind(False, True) - usual)
    return kept, max(of_kind(d, n) for d in kinds(census.dense_layers) for n in kinds(census.linear_layers))


def micro_batches_in_flight(layout: Layout, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a pipeline stage holds at its peak; a model chunk counts as its share of one."""
    if layout.virtual_stages == 1:
        return min(micro_batches, layout.pipeline_parallel - stage)
    chunks = 2 * (layout.pipeline_parallel - stage - 1) + (layout.virtual_stages - 1) * layout.pipeline_parallel + 1
    return min(micro_batches * layout.virtual_stages, chunks) / layout.virtual_stages


def hidden_bytes(hf: dict[str, Any], layout: Layout, tokens: int) -> float:
    """Of what goes from layer to layer, on one rank."""
    return 2.0 * tokens / (layout.context_parallel * layout.tensor_parallel) * hf["hidden_size"]


def kept_bytes(
    hf: dict[str, Any], recipe: Recipe, layout: Layout, census: StageCensus, tokens: int, imbalance: float
) -> tuple[float, float]:
    """What the layers of a pipeline stage keep of a micro-batch, and at most hold of it beside that.

    The layer in its backward pass holds the gradients of its activations, and before them what its forward pass makes
    again.
    """
    again, how = Recompute.of(recipe.actor.recompute, recipe.megatron), keeping(recipe)
    whole = Keeping(fused=how.fused, fp8=how.fp8)
    all_kept, largest = all_layers_bytes(hf, layout, tokens, census, imbalance, whole)
    if again.whole:
        chunk = math.ceil(census.layers / layout.virtual_stages)
        repeated = again.again(chunk)
        together = min(again.layers, chunk) if again.method == "uniform" else 1
        inputs = layout.virtual_stages * math.ceil(repeated / together)
        kept = inputs * hidden_bytes(hf, layout, tokens) + (chunk - repeated) / chunk * all_kept
        return kept, (1 + together * (repeated > 0)) * largest
    kept, of_largest = all_layers_bytes(hf, layout, tokens, census, imbalance, how)
    return kept, (largest - of_largest) + largest


def stage_bytes(
    hf: dict[str, Any],
    recipe: Recipe,
    layout: Layout,
    stage: int,
    census: StageCensus,
    tokens: int,
    in_flight: float,
    imbalance: float,
) -> float:
    """Of a pipeline stage at its peak, with ``in_flight`` micro-batches of ``tokens``."""
    kept, beside = kept_bytes(hf, recipe, layout, census, tokens, imbalance)
    hidden, virtual = hidden_bytes(hf, layout, tokens), layout.virtual_stages
    # Megatron's schedules keep what a model chunk has sent to the next; the last one has a norm behind its layers
    last = stage == layout.pipeline_parallel - 1
    sent = virtual - last
    return in_flight * (kept + sent * hidden) + beside + last * hidden


def repeated_share(hf: dict[str, Any], recipe: Recipe, layout: Layout, forward: float, length: float) -> float:
    """Of the operations of a forward pass, ``forward``, those that the backward pass repeats."""
    again = Recompute.of(recipe.actor.recompute, recipe.megatron)
    if again.whole:
        chunk = max(map(len, layout.chunks(hf["num_hidden_layers"])))
        return again.again(chunk) / chunk
    return family_of(hf).repeated_flops(hf, length, again.modules) / forward
