"""Checkpoints inside a stage: all state that the next update depends on, written atomically."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import queue
import re
import shutil
import tempfile
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megarl.actor.optimizer import gather_parameters
from megarl.actor.optimizer_state import adam_step, set_adam_step, sharded_adam_state
from megarl.actor.step import Actor
from megarl.errors import UserError
from megarl.objectives.parts.clipping import RatioBounds
from megarl.objectives.parts.second_moment import SecondMomentMask
from megarl.recipe.layout import Layout
from megarl.storage.files import atomic_directory, make_directory


class _ForkedResults:
    """Stands in for Megatron's queue of results from the forked writers of one checkpoint: a file both sides have open.

    Megatron's queue is served by another process, which would outlive a killed rank. A pipe would fill up, since it is
    read only after the writers have ended.
    """

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - the writers inherit it

    def put(self, results: Any) -> None:
        pickle.dump(results, self.file)
        self.file.flush()

    def get_nowait(self) -> Any:
        self.file.seek(0)
        try:
            results = pickle.load(self.file)
        except EOFError as error:
            raise queue.Empty from error
        self.file.seek(0)
        self.file.truncate()
        return results


_NAME = re.compile(r"update_(\d{6})")
# Megatron-Core 0.16 has one asynchronous writer; 0.19 prefers another one, from a separate package
_WRITER: dict[str, Any] = (
    {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters else {}
)


def checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(update inside the stage, path) of every complete checkpoint, oldest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in directory.glob("update_*"))
    return sorted((int(match[1]), path) for match, path in found if match)


def remove_unfinished(directory: Path) -> None:
    """Delete what killed attempts left half-written in ``directory``. For one process, while no other writes there."""
    for leftover in directory.glob(".update_*.tmp"):
        shutil.rmtree(leftover)


def save(actor: Actor, directory: Path, update: int, keep: int, wait: bool = True) -> Path:
    """Write ``directory/update_XXXXXX`` under a temporary name and rename it; keep the newest ``keep``. Collective.

    With ``wait`` False it returns after the copy to host memory: forked processes write, and `finish` renames.
    """
    finish(actor)
    gather_parameters(actor.replicas)
    # a new one for each checkpoint, and of this process: ranks may themselves be forks of one that imported this module
    filesystem_async._results_queue = _ForkedResults()
    target = directory / f"update_{update:06d}"
    with contextlib.ExitStack() as stack:
        temporary = None
        if dist.get_rank() == 0:
            make_directory(directory)
            temporary = stack.enter_context(atomic_directory(target))
        path = _broadcast_path(temporary)
        state = _state_to_save(actor, update)
        request = dist_checkpointing.save(state, str(path), async_sharded_save=True, **_WRITER)
        request.add_finalize_fn(partial(_rename, stack.pop_all(), directory, keep))
    actor.saving.schedule_async_request(request)
    if wait:
        finish(actor)
    return target


def finish(actor: Actor, wait: bool = True) -> None:
    """Complete the checkpoint being written, if any; with ``wait`` False only if every rank is done. Collective."""
    if actor.saving.get_num_unfinalized_calls():
        actor.saving.maybe_finalize_async_calls(blocking=wait)


def _rename(stack: contextlib.ExitStack, directory: Path, keep: int) -> None:
    stack.close()
    if dist.get_rank() == 0:
        for _, old in checkpoints(directory)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()


def load(actor: Actor, path: Path) -> int:
    """Restore model, optimizer and random state in place; returns the update inside the stage to continue after.

    The checkpoint may come from another layout. Then the random state, which belongs to a rank, is not restored; no
    update draws random numbers.
    """
    with torch.serialization.safe_globals([RatioBounds, SecondMomentMask]):
        common = dist_checkpointing.load_common_state_dict(str(path))
        state = _sharded_state(actor)
        if common["layout"] == _layout(actor):
            state["random"] = _random_state()
        state = dist_checkpointing.load(state, str(path))
    for index, model in enumerate(actor.models):
        result = model.load_state_dict(state[f"model{index}"], strict=False)
        lost = [key for key in result.missing_keys if not key.endswith("_extra_state")]  # Transformer Engine's
        if lost or result.unexpected_keys:
            raise UserError(f"{path} does not fit the model: {[*lost, *result.unexpected_keys][0]}")
    set_adam_step(actor.optimizer, common["adam_step"])
    if "random" in state:
        _restore_random_state(state["random"])
    actor.skipped_updates = common["skipped_updates"]
    actor.lagged = _to_device(common["lagged"], actor.device)
    return common["update"]


def _state_to_save(actor: Actor, update: int) -> dict[str, Any]:
    return _sharded_state(actor) | {
        "random": _random_state(),
        "update": update,
        "adam_step": adam_step(actor.optimizer),
        "skipped_updates": actor.skipped_updates,
        "lagged": _shared_statistics(actor),
        "layout": _layout(actor),
    }


def _sharded_state(actor: Actor) -> dict[str, Any]:
    # "singleton_local_shards": on disk each layer and each expert is a separate tensor
    metadata = {
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": True,
    }
    state = {f"model{i}": model.sharded_state_dict(metadata=metadata) for i, model in enumerate(actor.models)}
    if not actor.models[0].config.fp8:
        # else empty, and not there for all modules of another kind of layers
        state = {i: {k: v for k, v in part.items() if "_extra_state" not in k} for i, part in state.items()}
    return state | {"adam": sharded_adam_state(actor.optimizer, state)}


def _layout(actor: Actor) -> dict[str, int]:
    """Everything that determines which rank holds which part of the state."""
    return asdict(Layout.of(actor.recipe, dist.get_world_size()))


def _random_state() -> ShardedObject:
    tracker = get_cuda_rng_tracker().get_states()
    state = {"cpu": torch.get_rng_state(), "tracker": tracker}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("random", state, (dist.get_world_size(),), (dist.get_rank(),))


def _restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _broadcast_path(path: Path | None) -> Path:
    box = [str(path)]
    dist.broadcast_object_list(box, src=0)
    return Path(box[0])


def _shared_statistics(actor: Actor) -> Any:
    """The lagged statistics. Rank 0 writes them, but only the last pipeline stage has them. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, _to_device(actor.lagged, torch.device("cpu")))
    return next((statistics for statistics in everyone if statistics is not None), None)


def _to_device(statistics: Any, device: torch.device) -> Any:
    if not statistics:
        return None
    moved = {f.name: getattr(statistics, f.name) for f in fields(statistics)}
    return replace(statistics, **{k: v.to(device) for k, v in moved.items() if torch.is_tensor(v)})
