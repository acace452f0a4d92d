"""Adam's state as pieces of whole tensors, so that a checkpoint of one layout loads into any other.

Megatron's distributed optimizer gives each data-parallel rank a range of the flattened parameters. Its own
"fully_reshardable" checkpoints first gather all ranges on every data-parallel rank: 48 GB a rank for Qwen3-30B-A3B on
32 GPUs. But a range of a flattened matrix is at most three rectangles of that matrix, and torch's distributed
checkpoints store and load rectangles. So every rank writes its own rectangles, and nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def rectangles(start: int, end: int, shape: tuple[int, ...]) -> list[Rectangle]:
    """Elements [start, end) of a flattened tensor as rectangles of the tensor, in order: at most 2 len(shape) - 1."""
    if start >= end:
        return []
    if len(shape) == 1:
        return [((start,), (end - start,))]
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # whole rows

    def part_of_row(index: int, begin: int, stop: int) -> list[Rectangle]:
        return [((index, *offset), (1, *size)) for offset, size in rectangles(begin, stop, shape[1:])]

    if first > last:  # inside one row
        return part_of_row(last, start - last * row, end - last * row)
    whole = [((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))] if last > first else []
    before = part_of_row(first - 1, start - (first - 1) * row, row) if start < first * row else []
    after = part_of_row(last, 0, end - last * row)
    return [*before, *whole, *after]


def sharded_adam_state(optimizer: MegatronOptimizer, model_state: Any) -> dict[str, ShardedTensor]:
    """This rank's Adam moments, and the float32 master weights of bfloat16 parameters, for `dist_checkpointing`.

    model_state: sharded state dicts of all model chunks. The tensors are views of the optimizer's, so loading into them
    restores everything but the step count, for which there is `set_adam_step`.
    """
    kinds = (ShardedTensor, ShardedTensorFactory)
    shards = {part.data: part for part in nested_values(model_state) if isinstance(part, kinds)}
    state = {}
    for part in distributed_optimizers(optimizer):
        create_adam_state(part)
        for parameter, (group, order) in part.model_param_group_index_map.items():
            shard = part.optimizer.param_groups[group]["params"][order]
            held = part.optimizer.state[shard]
            tensors = {name: held[name] for name in ("exp_avg", "exp_avg_sq")}
            if parameter.dtype != torch.float32:  # an optimizer on the host keeps the master weights in its state
                tensors["parameter"] = held.get("master_param", shard)
            owned = part._get_model_param_range_map(parameter)["param"]
            for name, tensor in tensors.items():
                for piece in _pieces(shards[parameter], parameter, owned.start, tensor.detach(), name):
                    state[f"{piece.key}{piece.global_offset}"] = piece
    return state


def _pieces(
    shard: ShardedTensor | ShardedTensorFactory, parameter: torch.Tensor, start: int, flat: torch.Tensor, name: str
) -> Iterator[ShardedTensor]:
    """Cut ``flat``, the state of ``parameter.view(-1)[start : start + len(flat)]``, into rectangles with their
    offsets in the whole tensors on disk."""
    blocks = nested_values(shard.build()) if isinstance(shard, ShardedTensorFactory) else [shard]
    for block in blocks:  # several where a parameter fuses tensors that are separate on disk, as gate and up
        assert block.data.is_contiguous()
        begin = (block.data.data_ptr() - parameter.data_ptr()) // parameter.element_size()
        low, high = max(start, begin), min(start + flat.numel(), begin + block.data.numel())
        for offset, size in rectangles(low - begin, high - begin, tuple(block.data.shape)):
            count = math.prod(size)
            data = flat[low - start : low - start + count].view(size)
            low += count
            yield ShardedTensor(
                key=f"optimizer.{name}.{block.key}",
                data=data,
                dtype=data.dtype,
                local_shape=size,
                global_shape=block.global_shape,
                global_offset=tuple(a + b for a, b in zip(block.global_offset, offset, strict=True)),
                axis_fragmentations=None,  # irregular
                # 0 in place of the data-parallel rank, since those ranks hold different ranges; replicas by tensor
                # parallelism and tied embeddings remain replicas
                replica_id=(*block.replica_id[:2], 0),
                allow_shape_mismatch=block.allow_shape_mismatch,
            )


def distributed_optimizers(optimizer: MegatronOptimizer) -> list[DistributedOptimizer]:
    """The parts of a chained optimizer (for experts, for all other parameters) in which this rank owns parameters."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not part.is_stub_optimizer]


def create_adam_state(optimizer: DistributedOptimizer) -> None:
    """Create Adam's moments as zeros, and master weights where Adam keeps them, as its first step otherwise would."""
    for inner in _inner_optimizers(optimizer):
        for group in inner.param_groups:
            for parameter in group["params"]:
                if not inner.state[parameter]:
                    _create(inner, parameter, group)
    if isinstance(optimizer.optimizer, HybridDeviceOptimizer):
        optimizer.optimizer._sync_sub_optimizers_state_to_hdo()


def _create(inner: Any, parameter: torch.Tensor, group: dict[str, Any]) -> None:
    state = inner.state[parameter]
    if isinstance(inner, torch.optim.Adam):
        state["step"] = torch.tensor(0.0, device=parameter.device if group["fused"] else "cpu")
    state["exp_avg"] = torch.zeros_like(parameter)
    state["exp_avg_sq"] = torch.zeros_like(parameter)


def _inner_optimizers(optimizer: DistributedOptimizer) -> list[torch.optim.Optimizer]:
    """The Adam optimizers of a part. If part of it is offloaded to the host: one for each offloaded parameter, and one
    for those on the GPU."""
    if isinstance(optimizer.optimizer, HybridDeviceOptimizer):
        return list(optimizer.optimizer.sub_optimizers)
    return [optimizer.optimizer]


def adam_step(optimizer: MegatronOptimizer) -> int:
    """Number of updates made: torch's Adam counts them per parameter, Transformer Engine's and Apex's per group."""
    for part in distributed_optimizers(optimizer):
        for inner in _inner_optimizers(part):
            for group in inner.param_groups:
                if "step" in group:
                    return int(group["step"])
                for parameter in group["params"]:
                    return int(inner.state[parameter].get("step", 0))
    return 0


def set_adam_step(optimizer: MegatronOptimizer, step: int) -> None:
    """Set the number of updates made, which `adam_step` reads."""
    for part in distributed_optimizers(optimizer):
        for inner in _inner_optimizers(part):
            for group in inner.param_groups:
                if not isinstance(inner, torch.optim.Adam):
                    group["step"] = step
                    continue
                for parameter in group["params"]:  # a tensor for each, since Adam increments it in place
                    count = torch.tensor(float(step), device=parameter.device if group["fused"] else "cpu")
                    inner.state[parameter]["step"] = count
