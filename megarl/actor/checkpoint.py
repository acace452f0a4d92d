"""Checkpoints inside a stage: all state that the next update depends on, written atomically and with checksums.

A checkpoint may come from another person, for example when a run continues from someone else's. So unpickling accepts
only a fixed list of types that hold plain data.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, StorageMeta

from megarl.actor import lora
from megarl.actor.optimizer import gather_parameters
from megarl.actor.optimizer_state import adam_step, set_adam_step, sharded_adam_state
from megarl.actor.step import Actor
from megarl.errors import UserError
from megarl.heartbeats import beat
from megarl.storage.checkpoints import (
    METRICS,
    Damaged,
    FileSum,
    Manifest,
    check_files,
    checkpoint_path,
    checkpoints,
    read_manifest,
    write_manifest,
)
from megarl.storage.files import atomic_directory, disk_errors, make_directory
from megarl.storage.metrics import NOTHING, MetricsWriter, Position

# Megatron-Core 0.16 has one asynchronous writer; 0.19 defaults to another, from a separate package
_WRITER: dict[str, Any] = (
    {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters else {}
)


# the types that a checkpoint's .metadata consists of, by module
_DATA_TYPES = {
    "torch": {"Size", "strided", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",  # of `_UNREAD`
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.distributed.checkpoint.planner": {"SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"},
}


_COMMON = "common.pt"  # what all ranks have in common, under the name by which every Megatron-Core looks for it
_UNREAD = "common_state/shard_0_1"  # a pickle that 0.19 writes, and loads only from a checkpoint without common.pt


class _DataUnpickler(pickle.Unpickler):
    """Unpickles objects of `_DATA_TYPES`, which only hold data; `pickle.UnpicklingError` for any other type."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _DATA_TYPES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def _read_metadata(path: Path) -> Metadata:
    """The checkpoint's .metadata, which torch's own reader would unpickle without a check. `pickle.UnpicklingError` if
    it contains anything but data, or makes torch unpickle a tensor's bytes."""
    with open(path / ".metadata", "rb") as file:
        metadata: Metadata = _DataUnpickler(file).load()
    pickled = {key for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)}
    if pickled - {_UNREAD}:
        raise pickle.UnpicklingError(min(pickled - {_UNREAD}))
    metadata.storage_meta = metadata.storage_meta or StorageMeta()
    return metadata


def remove_unfinished(directory: Path) -> None:
    """Delete half-written checkpoints of killed processes in ``directory``. To be called by one process, while no other
    writes there."""
    for leftover in directory.glob(".update_*.tmp"):
        shutil.rmtree(leftover)


def save(
    actor: Actor, directory: Path, update: int, keep: int, wait: bool = True, metrics: MetricsWriter | None = None
) -> Path:
    """Write ``directory/update_XXXXXX`` under a temporary name and rename it; keep the newest ``keep``. Collective.

    wait: False returns once the state is copied in host memory; a thread then writes the files, and a later `finish`
    renames. metrics: on the rank that writes metrics, their writer: the checkpoint gets a copy of the stage's
    lines; None on other ranks.
    """
    finish(actor)
    target = checkpoint_path(directory, update)
    beat("checkpoint", target.name)
    gather_parameters(actor.replicas)
    with contextlib.ExitStack() as stack:
        temporary = None
        if dist.get_rank() == 0:
            make_directory(directory)
            temporary = stack.enter_context(atomic_directory(target))
        box = [temporary]
        dist.broadcast_object_list(box, src=0)
        path, position = box[0], None
        assert path is not None
        if metrics is not None:
            with disk_errors(path):
                (path / METRICS).write_bytes(metrics.lines)
            position = metrics.position
        # which rank writes what is the same in each checkpoint of a process: the ranks compare it at the first one, and
        # from the third on exchange no plans
        request = dist_checkpointing.save(
            _sharded_state(actor),
            str(path),
            actor.saving.strategy,
            async_sharded_save=True,
            validate_access_integrity=actor.saving.call_idx < 0,
            **_WRITER,
        )
        _write_common(actor, update, path)
        complete = partial(_complete, actor, path, update, position)
        request.add_finalize_fn(partial(_rename, stack.pop_all(), complete, directory, keep))
    actor.saving.start(request, path, target.name, dist.get_rank())
    if wait:
        finish(actor)
    return target


def _write_common(actor: Actor, update: int, path: Path) -> None:
    """Write the state common to all ranks, over the empty file that Megatron-Core 0.16 has just written. Collective."""
    common = {
        "update": update,
        "adam_step": adam_step(actor.optimizer),
        "skipped_updates": actor.skipped_updates,
        "lora": _adapters(actor),
    }
    if dist.get_rank() == 0:
        torch.save(common, data := io.BytesIO())
        with disk_errors(path):
            (path / _COMMON).write_bytes(data.getbuffer())


def finish(actor: Actor, wait: bool = True) -> None:
    """Complete the checkpoint being written, if any. Collective.

    wait: False returns at once if some rank is still writing; a later call completes it."""
    actor.saving.finish(wait)


def _complete(actor: Actor, path: Path, update: int, position: Position | None) -> None:
    """Write the manifest, now that all other files are there. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (actor.saving.sums, position))
    if dist.get_rank() == 0:
        files = {name: entry for written, _ in everyone for name, entry in written.items()}
        for file in path.iterdir():  # *.distcp files have their sums from the writers, the others are small
            if file.suffix != ".distcp":
                files[file.name] = FileSum.of(file)
            elif file.name not in files:
                raise RuntimeError(f"{file} was written without a checksum")
        positions = [position for _, position in everyone if position is not None]
        write_manifest(path, Manifest(update, dict(sorted(files.items())), *(positions or [NOTHING])))


def _rename(stack: contextlib.ExitStack, complete: Callable[[], None], directory: Path, keep: int) -> None:
    with stack:
        complete()
    if dist.get_rank() == 0:
        for _, old in checkpoints(directory)[:-keep]:
            shutil.rmtree(old, ignore_errors=True)  # on NFS it fails while somebody reads a file
    dist.barrier()


def verify(path: Path) -> str | None:
    """Check a checkpoint's files against its manifest; returns the first damage in words, None if there is none.

    Each rank reads its share of the files. Collective."""
    damage = None
    try:
        manifest = read_manifest(path)
        check_files(path, dict(sorted(manifest.files.items())[dist.get_rank() :: dist.get_world_size()]))
    except Damaged as error:
        damage = str(error)
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, damage)
    return next(filter(None, everyone), None)


def load(actor: Actor, path: Path) -> int:
    """Restore model and optimizer in place; returns the stage's update after which the checkpoint was saved.

    It may come from another layout. `UserError` if it does not fit the model.
    """
    common, state = _load_data(actor, path)
    for index, model in enumerate(actor.models):
        result = model.load_state_dict(state[f"model{index}"], strict=False)
        adapters = bool(model.adapters)  # then the checkpoint has the adapters alone, not the frozen weights
        lost = [key for key in result.missing_keys if not _is_extra(key) and lora.is_adapters(key) == adapters]
        if lost:
            raise UserError(f"{path} does not fit the model: it lacks {lost[0]}")
        if result.unexpected_keys:
            raise UserError(f"{path} does not fit the model, which has no {result.unexpected_keys[0]}")
    set_adam_step(actor.optimizer, common["adam_step"])
    actor.skipped_updates = common["skipped_updates"]
    return common["update"]


def _load_data(actor: Actor, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state common to all ranks, and this rank's. `UserError` for a file that contains anything but data."""
    before = FileSystemReader.read_metadata
    try:
        metadata, common = _read_metadata(path), torch.load(path / _COMMON, weights_only=True)
        _check_adapters(actor, common, path)
        FileSystemReader.read_metadata = lambda *_, **__: metadata  # type: ignore[method-assign]
        return common, dist_checkpointing.load(_sharded_state(actor), str(path))
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} is missing: remove {path} to continue from the one before it") from error
    except (pickle.UnpicklingError, CheckpointException) as error:
        causes = [cause for cause, _ in getattr(error, "failures", {}).values()] or [error]
        if not any(isinstance(cause, pickle.UnpicklingError) for cause in causes):
            raise
        raise UserError(
            f"{path} contains a type that no checkpoint of megarl contains and that may run code: it was not loaded"
        ) from error
    finally:
        FileSystemReader.read_metadata = before  # type: ignore[method-assign]


def _check_adapters(actor: Actor, common: dict[str, Any], path: Path) -> None:
    found, wanted = common.get("lora"), _adapters(actor)
    if found and wanted and found["base"] != wanted["base"]:
        raise UserError(
            f"the adapters in {path} belong to base weights with the hash {found['base']}, but the policy of stage 0 "
            f"has the hash {wanted['base']}: restore the policy with which the checkpoint was made"
        )
    if found != wanted:
        holds, asked = (f"adapters of {x}" if x else "all weights" for x in (found, wanted))
        raise UserError(
            f"{path} has {holds}, but [actor.lora] of the recipe asks for {asked}: one cannot be converted to the other"
        )


def _adapters(actor: Actor) -> dict[str, Any] | None:
    """The settings of ``[actor.lora]`` and the hash of the base weights; None without adapters."""
    table = actor.recipe.actor.lora
    return None if table is None else table.model_dump(mode="json") | {"base": actor.base}


def _sharded_state(actor: Actor) -> dict[str, Any]:
    # "singleton_local_shards": on disk each layer and each expert is a separate tensor
    metadata = {
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
        "singleton_local_shards": True,
    }
    # Transformer Engine's extra state (pickles, with nothing in them in bfloat16) is left out
    state = {
        f"model{i}": lora.sharded_state(model)
        if actor.recipe.actor.lora
        else {k: v for k, v in model.sharded_state_dict(metadata=metadata).items() if not _is_extra(k)}
        for i, model in enumerate(actor.models)
    }
    return state | {"adam": sharded_adam_state(actor.optimizer, state)}


def _is_extra(key: str) -> bool:
    return "_extra_state" in key
