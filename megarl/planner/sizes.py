"""Bytes and floating-point operations of a model, by formulas that the tests check by hand and against real models.

Bytes of an update are for the torch-native modules in bfloat16 and `kernels.linear_logprob`; Transformer Engine's
modules keep fewer activations. What depends on the model family comes from `megarl.models`. In all functions ``hf`` is
the model's config.json and ``parameters`` the number of all its parameters.

Activations are not measured on the actor's own model: a torch without CUDA cannot index fake CUDA tensors, and on the
meta device autograd saves other tensors than on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megarl.models import family_of
from megarl.planner.assumptions import GIB
from megarl.planner.parameter_counts import StageParameters
from megarl.recipe.actor_table import Recompute
from megarl.recipe.layout import Layout
from megarl.recipe.tables import Recipe


@dataclass(frozen=True)
class Gpu:
    memory: float  # bytes that a process can allocate
    flops: float  # bfloat16 a second, dense, as the vendor states it
    bandwidth: float  # bytes a second of its memory


GPUS = {
    "a100": Gpu(79.1 * GIB, 312e12, 2.04e12),
    "h100": Gpu(79.1 * GIB, 989e12, 3.35e12),
    "h200": Gpu(139.8 * GIB, 989e12, 4.8e12),
    "h20": Gpu(95.1 * GIB, 148e12, 4.0e12),
    "b200": Gpu(178.3 * GIB, 2250e12, 8.0e12),
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


def stage_bytes(
    hf: dict[str, Any], recipe: Recipe, layout: Layout, stage: int, tokens: int, in_flight: float, imbalance: float
) -> tuple[float, float]:
    """(bytes that a pipeline stage keeps of ``in_flight`` micro-batches of ``tokens``, most bytes held in addition).

    The second are of the one layer that is in its backward pass: the activations that it has recomputed, and the
    gradients of its activations. imbalance: tokens of the fullest expert rank over the mean.
    """
    family, again, hidden = family_of(hf), Recompute.of(recipe.actor.recompute, recipe.megatron), hf["hidden_size"]
    layers = layout.layers_of_stage(stage, hf["num_hidden_layers"])
    uneven = imbalance if layout.expert_parallel > 1 else 1.0

    def kept(recomputed: frozenset[str]) -> list[float]:
        return [family.kept(hf, layout, layer, uneven, recomputed) for layer in layers]

    every, virtual = kept(frozenset()), layout.virtual_stages
    if again.whole:
        chunk = math.ceil(len(layers) / virtual)
        repeated = again.again(chunk)
        together = min(again.layers, chunk) if again.method == "uniform" else 1
        inputs = virtual * math.ceil(repeated / together)
        saved, beside = inputs * hidden + (chunk - repeated) / chunk * sum(every), (1 + together) * max(every)
    else:
        remaining = kept(again.modules)
        saved, beside = sum(remaining), 2 * max(every) - max(remaining)
    # Megatron keeps the output that a model chunk has sent to the next; the last chunk ends with a norm
    last = stage == layout.pipeline_parallel - 1
    elements = in_flight * (saved + (virtual - last) * hidden) + last * hidden
    of_token = 2 * tokens / (layout.context_parallel * layout.tensor_parallel)
    return elements * of_token, beside * of_token


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
    family = family_of(hf)
    feed_forwards = [family.sublayers(hf, layer)[1] for layer in range(hf["num_hidden_layers"])]
    width = sum(each.repeated_width(hf, again.modules) for each in feed_forwards)
    total = 6 * length * width * hf["hidden_size"]  # of gate, up and down
    return (total + ("core_attn" in again.modules) * family.mixing_flops(hf, length)) / forward
