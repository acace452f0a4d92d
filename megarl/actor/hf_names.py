"""Cuts Megatron's parameters into views that are the tensors of a Hugging Face model.

`megarl.models` says which tensors make up a parameter, by the parameter's name in Megatron's torch-native modules. This
module translates the names of both forms of the experts to those names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.actor.lora import Adapter, is_adapters
from megarl.actor.model import PolicyModel
from megarl.models import family_of
from megarl.models.tensors import LM_HEAD, TRANSPOSED, TensorNames


@dataclass(frozen=True)
class LowRank:
    """The product that an adapter adds to a slice: scale B A."""

    ups: tuple[torch.Tensor, ...]  # for each view of the slice its rows of B
    a: torch.Tensor
    scale: float


@dataclass(frozen=True)
class HfTensor:
    """This rank's slice of a Hugging Face tensor."""

    name: str  # has "{}" in place of the expert's number in tensors of single experts
    views: tuple[torch.Tensor, ...]  # views of a Megatron parameter; concatenated along dimension 0 they are the slice
    split: int | None  # dimension that tensor parallelism splits; None: replicated
    local_expert: int | None = None  # the expert's number on this rank
    low_rank: LowRank | None = None  # with an adapter: its product, not yet added to the views

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the slice."""
        return (sum(view.shape[0] for view in self.views), *self.views[0].shape[1:])

    def blocks(self, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The slice in blocks: (first row in the slice, view of at most ``rows`` rows)."""
        first = 0
        for view in self.views:
            for block in view.split(rows):
                yield first, block
                first += block.shape[0]

    def merged_blocks(self, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
        """As `blocks`; with an adapter its product is added, and the blocks are float32 copies."""
        if (added := self.low_rank) is None:
            yield from self.blocks(rows)
            return
        down = added.a.float()
        ups = (part for up in added.ups for part in up.split(rows))
        for (first, block), up in zip(self.blocks(rows), ups, strict=True):
            yield first, block.float() + added.scale * (up.float() @ down).view(block.shape)


_EXPERT = re.compile(
    r"mlp\.experts\.(?:"
    r"(?P<kind>weight|bias)(?P<stacked_fc>[12])"  # `megarl.actor.experts`: all experts in one tensor
    r"|linear_fc(?P<grouped_fc>[12])\.(?P<grouped_kind>weight|bias)(?P<grouped>\d+))"  # TEGroupedMLP
)


def hf_tensors(models: list[PolicyModel]) -> Iterator[HfTensor]:
    """All Hugging Face tensors of which this rank holds a slice, in the order of the model.

    Tied embeddings are also yielded as `LM_HEAD`, on the last pipeline stage.
    """
    for model in models:
        biases = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(".expert_bias"))
        weights = ((name, weight) for name, weight in model.named_parameters() if not is_adapters(name))
        for name, parameter in itertools.chain(weights, biases):
            yield from _tensors_of_parameter(name, parameter.detach(), model)
        if model.share_embeddings_and_output_weights and model.pre_process and model.post_process:
            weight = model.embedding.word_embeddings.weight.detach()
            yield HfTensor(LM_HEAD, (weight,), 0)


def _tensors_of_parameter(name: str, parameter: torch.Tensor, model: PolicyModel) -> Iterator[HfTensor]:
    experts: list[tuple[int | None, torch.Tensor]] = [(None, parameter)]
    family = family_of(model.hf)
    if (tensors := family.outside_layers().get(name)) is not None:
        prefix = ""
    else:
        _, _, local, rest = name.split(".", 3)  # decoder.layers.<local>.<rest>
        layer, native = int(model.decoder.layers[int(local)].layer_number) - 1, rest
        prefix = f"{family.prefix}layers.{layer}."
        if match := _EXPERT.fullmatch(rest):
            number, experts = _experts(match, parameter, model.config)
            native = f"mlp.experts.linear_fc{number}.{match['kind'] or match['grouped_kind']}"
        tensors = family.layer_tensors(model.hf, layer).get(native)
    if tensors is None:
        raise NotImplementedError(f"no Hugging Face tensor is known for Megatron's parameter {name}")
    adapter = model.adapters.get(name)
    for expert, weight in experts:
        added = _adapter_products(adapter, expert, tensors) if adapter else [None] * len(tensors.names)
        for hf_name, views, low_rank in zip(tensors.names, _views(weight, tensors), added, strict=True):
            yield HfTensor(prefix + hf_name, views, tensors.split, expert, low_rank)


def _adapter_products(adapter: Adapter, expert: int | None, tensors: TensorNames) -> list[LowRank | None]:
    """For each of ``tensors`` the adapter's product; B is cut into views as the parameter is."""
    up, a = adapter.up().detach(), adapter.a.detach()
    if expert is not None:
        up, a = up[expert], a[expert]
    if tensors.packing in TRANSPOSED:  # the transposed product is A' B'
        (turned,) = _views(up, tensors)
        return [LowRank((a.t(),), turned[0].flatten(1), adapter.scale)]
    return [LowRank(ups, a, adapter.scale) for ups in _views(up, tensors)]


def _views(parameter: torch.Tensor, tensors: TensorNames) -> list[tuple[torch.Tensor, ...]]:
    """For each of ``tensors`` the views of the parameter that it consists of."""
    if tensors.packing == "rows":
        return [(part,) for part in parameter.chunk(len(tensors.names))]
    if tensors.packing in TRANSPOSED:
        halves = parameter.unflatten(0, (2, -1)) if tensors.packing == "alternate_columns" else parameter
        return [(halves.permute(*reversed(range(halves.ndim))),)]
    sizes = list(tensors.group)
    if tensors.packing == "groups":
        groups = [group.split(sizes) for group in parameter.split(sum(sizes))]
        return [tuple(group[i] for group in groups) for i in range(len(sizes))]
    queries, width, _ = sizes
    groups = [group.split([queries, *sizes]) for group in parameter.split(queries + sum(sizes))]
    heads = [zip(group[0].split(width), group[1].split(width), strict=True) for group in groups]
    query_and_gate = tuple(part for group in heads for head in group for part in head)
    return [query_and_gate, *(tuple(group[i] for group in groups) for i in (2, 3))]


def _experts(
    match: re.Match[str], parameter: torch.Tensor, config: TransformerConfig
) -> tuple[str, list[tuple[int | None, torch.Tensor]]]:
    """Split an experts' parameter: which of the two layers of an expert it belongs to ("1" or "2"), and for each local
    expert its number and its matrix [outputs, inputs] or bias [outputs]."""
    if match["stacked_fc"]:
        one_by_one = parameter if match["kind"] == "weight" else parameter.view(_local_experts(config), -1)
        return match["stacked_fc"], list(enumerate(one_by_one))
    return match["grouped_fc"], [(int(match["grouped"]), parameter)]


def expert_number(local: int, rank: int, config: TransformerConfig) -> int:
    """The number in the whole model of expert ``local`` of expert-parallel rank ``rank``."""
    return local + rank * _local_experts(config)


def _local_experts(config: TransformerConfig) -> int:
    return int(config.num_moe_experts // mpu.get_expert_model_parallel_world_size())


def name_on_this_rank(tensor: HfTensor, model: PolicyModel) -> str:
    """The tensor's name, in which an expert's number is filled in."""
    if tensor.local_expert is None:
        return tensor.name
    rank = mpu.get_expert_model_parallel_rank()
    return tensor.name.format(expert_number(tensor.local_expert, rank, model.config))
