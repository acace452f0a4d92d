"""Low-rank adapters: to a frozen matrix W (alpha / rank) B A is added, and only A and B are trained.

Hu et al. 2021, arXiv 2106.09685, section 4.1. A starts random and B zero. An adapter is sharded as its matrix is: where
tensor parallelism divides W's outputs it divides B's, where it divides W's inputs it divides A's, and the other of the
two is replicated. Ranks exchange A's outputs, ``rank`` numbers a token. Matrices that Megatron fuses (query, key and
value; gate and up) have one adapter.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)

from megarl.actor.experts import GroupedExperts, grouped_linear
from megarl.actor.model import PolicyModel
from megarl.models.lora import Matrix, targeted
from megarl.recipe.actor_table import LoraTable
from megarl.recipe.tables import Recipe


class Adapter(torch.nn.Module):
    """This rank's shard of the adapter of one matrix, or of the adapters of the matrix in each of its experts.

    a: A, [rank, inputs].
    b: B, [parts, outputs / parts, rank]. Gate and up projection are one matrix of 2 parts, each of which tensor
        parallelism divides, so the shard is one block of this tensor; other matrices have 1 part.
    key: the adapter's name in checkpoints, which also seeds its random numbers.

    For experts, A and B have a first dimension more: the experts of this rank.
    """

    def __init__(
        self, key: str, weight: torch.Tensor, shape: tuple[int, ...], matrix: Matrix, table: LoraTable
    ) -> None:
        """weight: this rank's part of the matrix, or of one of its experts or all; shape: that of it, or of all."""
        super().__init__()
        self.key, self.matrix, self.scale = key, matrix, table.scale
        self.group = _group(matrix)
        *experts, outputs, inputs = shape
        self.a = torch.nn.Parameter(weight.new_zeros(*experts, table.rank, inputs))
        self.b = torch.nn.Parameter(weight.new_zeros(*experts, matrix.parts, outputs // matrix.parts, table.rank))
        for parameter in (self.a, self.b):
            parameter.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
            axis = self._divided_axis(parameter)
            # without these attributes Megatron takes the parameter for replicated, and counts it in the gradient's
            # norm only on the first tensor-parallel rank
            if axis is not None or self.group.size() == 1:
                set_tensor_model_parallel_attributes(parameter, True, axis or 0, 1)
            elif not matrix.of_experts:
                # each rank applies it to its own tokens; the attribute makes Megatron sum the gradients
                parameter.sequence_parallel = True  # type: ignore[attr-defined]

    def _divided_axis(self, parameter: torch.Tensor) -> int | None:
        """The dimension of A or B that tensor parallelism divides; None if the parameter is replicated."""
        if self.matrix.whole:
            return None
        if self.matrix.splits_inputs:
            return self.a.ndim - 1 if parameter is self.a else None
        return self.b.ndim - 2 if parameter is self.b else None

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw A uniformly from +-1 / sqrt(inputs), as PEFT does; the values are the same in every layout."""
        rank, width = self.a.shape[-2:]
        inputs, first_input = width, 0
        if self.matrix.splits_inputs:
            inputs, first_input = width * self.group.size(), self.group.rank() * width
        first_expert = mpu.get_expert_model_parallel_rank() * len(self.a) if self.matrix.of_experts else 0
        for local, part in enumerate(self.a if self.matrix.of_experts else [self.a]):
            name = f"{seed} {self.key} {first_expert + local}"
            generator = _generator(name, torch.device("cpu"))
            whole = (2 * torch.rand(rank, inputs, generator=generator) - 1) * inputs**-0.5
            part.copy_(whole[:, first_input : first_input + width])

    def up(self) -> torch.Tensor:
        """B in the shape that matches the rows of W: [outputs, rank], or [experts, outputs, rank]."""
        return self.b.flatten(-3, -2)

    def sharded(self) -> Iterator[ShardedTensor]:
        """A and B with their offsets in the whole tensors, for `dist_checkpointing`."""
        for name, parameter in (("a", self.a), ("b", self.b)):
            axis, experts = self._divided_axis(parameter), self.matrix.of_experts
            offsets = [] if axis is None else [(axis, self.group.rank(), self.group.size())]
            if experts:
                offsets.append((0, mpu.get_expert_model_parallel_rank(), mpu.get_expert_model_parallel_world_size()))
            data_rank = (
                mpu.get_expert_data_parallel_rank()
                if experts
                else mpu.get_data_parallel_rank(with_context_parallel=True)
            )
            replica = (0, self.group.rank() if axis is None else 0, data_rank)
            key = f"{self.key}.{name}"
            yield ShardedTensor.from_rank_offsets(key, parameter, *offsets, replica_id=replica)


class LinearAdapter(Adapter):
    """The adapter of a linear layer, whose tokens tensor-parallel ranks divide."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The matrix's input -> the term to add to its output."""
        low = F.linear(x, self.a) * self.scale
        if self.group.size() > 1 and self.matrix.splits_inputs:
            low = reduce_scatter_to_sequence_parallel_region(low, group=self.group)
        elif self.group.size() > 1 and not self.matrix.whole:
            low = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=self.group)
        return F.linear(low, self.up())


class ExpertAdapter(Adapter):
    """The adapter of one of the two matrices that every expert has."""

    def forward(self, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """tokens [n, inputs], sorted by expert; ends [experts], where each expert's rows end -> [n, outputs] to add."""
        a, b = self.a, self.up()
        if self.group.size() > 1:  # each rank computes a part for all tokens: sum the replicated one's gradient
            if self.matrix.splits_inputs:
                b = copy_to_tensor_model_parallel_region(b, group=self.group)
            else:
                a = copy_to_tensor_model_parallel_region(a, group=self.group)
        return grouped_linear(grouped_linear(tokens, a, ends) * self.scale, b, ends)


def _generator(name: str, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]))


def round_stochastically(x: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """float32 -> ``dtype``, rounded up or down at random with expected value x (Gupta et al. 2015, arXiv 1502.02551,
    eq. 1).

    Weights that were read in ``dtype`` are multiples of its last place. Rounded to the nearest, they would be the same
    wherever training or an adapter adds less than half a unit in that place. name: seeds the random numbers, so that an
    export is reproducible.
    """
    bits = {torch.bfloat16: 16, torch.float16: 13}.get(dtype)  # mantissa bits of float32 that dtype lacks
    if bits is None:
        return x.to(dtype)
    generator = _generator(name, x.device)
    rounded = torch.randint(1 << bits, x.shape, generator=generator, dtype=torch.int32, device=x.device)
    rounded += x.view(torch.int32)  # in place, as an export counts its memory
    rounded >>= bits
    rounded <<= bits
    return rounded.view(torch.float32).to(dtype)


def _group(matrix: Matrix) -> torch.distributed.ProcessGroup:
    """The ranks over which tensor parallelism divides the matrix."""
    if matrix.of_experts:
        return mpu.get_expert_tensor_parallel_group()
    return mpu.get_tensor_model_parallel_group()


def attach(models: list[PolicyModel], recipe: Recipe) -> None:
    """Freeze the models and give them the adapters of ``[actor.lora]``; without that table leave them as they are."""
    table = recipe.actor.lora
    if table is None:
        return
    for model in models:
        model.requires_grad_(False)
        if model.pre_process:  # a recomputed layer gets gradients only if its input requires one
            model.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
        for local, layer in enumerate(model.decoder.layers):
            number = layer.layer_number - 1
            for matrix in targeted(model.hf, number, table.targets):
                key = f"decoder.layers.{number}.{matrix.name}"
                names, adapter = (_attach_to_experts if matrix.of_experts else _attach)(layer, key, matrix, table)
                model.adapters |= {f"decoder.layers.{local}.{name}": adapter for name in names}
                if not adapter.a.is_meta:
                    adapter.initialise(recipe.run.seed)


def _attach(layer: Any, key: str, matrix: Matrix, table: LoraTable) -> tuple[list[str], Adapter]:
    """Give the matrix its adapter; returns the names of the matrix's parameters in the layer, and the adapter."""
    linear = layer.get_submodule(matrix.name)
    linear.adapter = adapter = LinearAdapter(key, linear.weight, tuple(linear.weight.shape), matrix, table)
    linear.register_forward_hook(_add)
    return [f"{matrix.name}.weight"], adapter


def _attach_to_experts(layer: Any, key: str, matrix: Matrix, table: LoraTable) -> tuple[list[str], Adapter]:
    """As `_attach`, for the experts' matrix: one parameter of `GroupedExperts`, or one an expert."""
    experts, stacked = layer.mlp.experts, f"weight{matrix.name[-1]}"
    if isinstance(experts, GroupedExperts):
        weight = getattr(experts, stacked)
        experts.adapters[stacked] = adapter = ExpertAdapter(key, weight, tuple(weight.shape), matrix, table)
        return [f"mlp.experts.{stacked}"], adapter
    linear = layer.get_submodule(matrix.name)
    shape = (experts.num_local_experts, *linear.weight0.shape)
    linear.adapter = adapter = ExpertAdapter(key, linear.weight0, shape, matrix, table)
    linear.register_forward_hook(_add_to_experts)
    return [f"{matrix.name}.weight{number}" for number in range(shape[0])], adapter


def _add(linear: Any, inputs: tuple[Any, ...], output: Any) -> Any:
    """Forward hook of a linear layer: adds the adapter's term to its output, which Megatron's return with a bias."""
    if isinstance(output, tuple):
        return output[0] + linear.adapter(inputs[0]), output[1]
    return output + linear.adapter(inputs[0])


def _add_to_experts(linear: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, Any]) -> Any:
    """As `_add`, for Transformer Engine's grouped product of (tokens [n, inputs], the list of each expert's rows)."""
    tokens, counts = inputs
    ends = torch.tensor(counts).cumsum(0).to(tokens.device, torch.int32, non_blocking=True)
    return output[0] + linear.adapter(tokens, ends), output[1]


NAME = re.compile(r"\.(adapter|adapters\.weight[12])\.[ab]$")


def is_adapters(name: str) -> bool:
    """Whether the parameter of this name belongs to an adapter."""
    return NAME.search(name) is not None


def sharded_state(model: PolicyModel) -> dict[str, ShardedTensor]:
    """The sharded state of the adapters alone, by the names of the model's parameters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    shards = (shard for adapter in dict.fromkeys(model.adapters.values()) for shard in adapter.sharded())
    return {names[shard.data]: shard for shard in shards}
