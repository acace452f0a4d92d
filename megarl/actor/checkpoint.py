"""Checkpoints inside a stage: everything an update depends on, complete or not there at all."""

from __future__ import annotations

import queue
import re
import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megarl.actor.step import Actor
from megarl.errors import UserError
from megarl.files import atomic_directory, make_directory
from megarl.objectives.clipping import RatioBounds
from megarl.objectives.second_moment import SecondMomentMask

# Saves are synchronous, so their results need no queue in a process of its own, which would outlive a killed rank.
filesystem_async._results_queue = queue.Queue()

_NAME = re.compile(r"update_(\d{6})")


def checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(update inside the stage, path) of every complete checkpoint, oldest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in directory.glob("update_*"))
    return sorted((int(match[1]), path) for match, path in found if match)


def save(actor: Actor, directory: Path, update: int, keep: int) -> Path:
    """Write ``directory/update_XXXXXX`` under a temporary name and rename it; keep the newest ``keep``. Collective."""
    target = directory / f"update_{update:06d}"
    state = _sharded_state(actor, is_loading=False)
    state.update(update=update, cpu_rng=torch.get_rng_state(), lagged=_shared_statistics(actor))
    if dist.get_rank() == 0:
        make_directory(directory)
        with atomic_directory(target) as temporary:
            _broadcast_path(temporary)
            dist_checkpointing.save(state, str(temporary))
        for _, old in checkpoints(directory)[:-keep]:
            shutil.rmtree(old)
    else:
        dist_checkpointing.save(state, str(_broadcast_path(None)))
    dist.barrier()
    return target


def load(actor: Actor, path: Path) -> int:
    """Restore model, optimizer and random state in place; returns the update inside the stage to continue after."""
    state = _sharded_state(actor, is_loading=True)
    state.update(update=0, cpu_rng=torch.get_rng_state(), lagged=None)
    with torch.serialization.safe_globals([RatioBounds, SecondMomentMask]):
        state = dist_checkpointing.load(state, str(path))
    for index, model in enumerate(actor.models):
        result = model.load_state_dict(state[_model_key(actor, index)], strict=False)
        lost = [key for key in result.missing_keys if not key.endswith("_extra_state")]  # which only TE has
        if lost or result.unexpected_keys:
            raise UserError(f"{path} does not fit the model: {[*lost, *result.unexpected_keys][0]}")
    actor.optimizer.load_state_dict(state["optimizer"])
    for optimizer in _distributed_optimizers(actor):
        _give_every_parameter_its_own_step(optimizer)
    torch.set_rng_state(state["cpu_rng"])
    actor.lagged = _to_device(state["lagged"], actor.device)
    return state["update"]


def _broadcast_path(path: Path | None) -> Path:
    box = [str(path)]
    dist.broadcast_object_list(box, src=0)
    return Path(box[0])


def _shared_statistics(actor: Actor) -> Any:
    """The lagged statistics, which only the last pipeline stage has, for rank 0 that writes them."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, _to_device(actor.lagged, torch.device("cpu")))
    return next((statistics for statistics in everyone if statistics is not None), None)


def _to_device(statistics: Any, device: torch.device) -> Any:
    if not statistics:
        return None
    moved = {f.name: getattr(statistics, f.name) for f in fields(statistics)}
    return replace(statistics, **{k: v.to(device) for k, v in moved.items() if torch.is_tensor(v)})


def _model_key(actor: Actor, index: int) -> str:
    return "model" if len(actor.models) == 1 else f"model{index}"


def _sharded_state(actor: Actor, is_loading: bool) -> dict[str, Any]:
    for optimizer in _distributed_optimizers(actor):
        _create_adam_state(optimizer)
    metadata = {
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
        # the default sharding fails in 0.16.1 and 0.19.2; this one loads into any layout
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }
    state: dict[str, Any] = {
        _model_key(actor, i): model.sharded_state_dict(metadata=metadata) for i, model in enumerate(actor.models)
    }
    state["optimizer"] = actor.optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
    return state


def _distributed_optimizers(actor: Actor) -> Iterator[DistributedOptimizer]:
    yield from getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])


def _is_torch_adam(optimizer: DistributedOptimizer) -> bool:
    return isinstance(optimizer.optimizer, torch.optim.AdamW)


def _create_adam_state(optimizer: DistributedOptimizer) -> None:
    """torch's Adam has no state before its first step, and Megatron's initialiser leaves out ``step``."""
    if not _is_torch_adam(optimizer):
        return
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.optimizer.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)


def _give_every_parameter_its_own_step(optimizer: DistributedOptimizer) -> None:
    """After load_state_dict all parameters share ONE step tensor, which Adam would advance once a parameter."""
    if not _is_torch_adam(optimizer):
        return
    for state in optimizer.optimizer.state.values():
        state["step"] = state["step"].clone()


@torch.no_grad()
def _set_main_param_and_optimizer_states(self: DistributedOptimizer, model_param: Any, tensors: dict[str, Any]) -> None:
    """Megatron's version raises KeyError('step') with torch's Adam and records a gradient for float32 parameters."""
    if not _is_torch_adam(self):
        _MEGATRON_SETTER(self, model_param, tensors)
        return
    group, order = self.model_param_group_index_map[model_param]
    main = self.optimizer.param_groups[group]["params"][order]
    for key, value in {"param": main, **self.optimizer.state[main]}.items():
        if key != "step":  # load_state_dict has set it
            value.copy_(tensors[key])


_MEGATRON_SETTER = DistributedOptimizer._set_main_param_and_optimizer_states
DistributedOptimizer._set_main_param_and_optimizer_states = _set_main_param_and_optimizer_states
