"""Hugging Face safetensors to Megatron parameters and back, a block of rows at a time, from and to any layout.

Besides its parameters a rank holds one block at a time. Loading reads only the rows of the rank's own slices. Exporting
gathers each block from the ranks that share the tensor, on the rank that writes it. The exported files have the names,
dtypes, shapes and expert layout (fused, or one tensor an expert) of the model that the policy started from.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megarl.actor.hf_names import HfTensor, expert_number, hf_tensors, name_on_this_rank
from megarl.actor.lora import round_stochastically
from megarl.actor.model import PolicyModel
from megarl.errors import UserError
from megarl.models import family_of
from megarl.models.tensors import LM_HEAD
from megarl.storage.files import atomic_directory, disk_errors, file_sha256
from megarl.storage.policies import (
    INDEX_FILE,
    PolicyInfo,
    Reference,
    combine_hashes,
    copy_auxiliary,
    weight_files,
    write_info,
    write_reference,
)
from megarl.storage.tensor_files import Region, TensorFiles, create_file

MAX_FILE_BYTES = 4 << 30
BLOCK_BYTES = 4 << 20  # bytes of a block of whole rows, together on all ranks that share the tensor


@torch.no_grad()
def load_hf(models: list[PolicyModel], model_dir: Path) -> None:
    """Fill this rank's model chunks from a Hugging Face directory.

    `UserError` if a tensor is missing, has a wrong shape or is not one of the model's.
    """
    tied, embedding = models[0].share_embeddings_and_output_weights, family_of(models[0].hf).embedding
    with TensorFiles(weight_files(Path(model_dir))) as source:
        _refuse_unknown(source, models, Path(model_dir))
        for tensor in hf_tensors(models):
            name = embedding if tied and tensor.name == LM_HEAD else name_on_this_rank(tensor, models[0])
            region = source.region(name)
            if region is None:
                raise UserError(f"{model_dir} has no tensor {name!r}, which its config.json requires")
            group = _sharing_group(tensor)
            _check_shape(region, tensor, group, name, models[0])
            _load(tensor, region, group)


def _load(tensor: HfTensor, region: Region, group: dist.ProcessGroup) -> None:
    height, *width = tensor.shape
    before = group.rank() * height if tensor.split == 0 else 0
    for first, block in tensor.blocks(max(1, BLOCK_BYTES // region.row_bytes)):
        rows = max(0, min(block.shape[0], region.shape[0] - before - first))
        value = region.read(before + first, rows)
        block[:rows].copy_(value.narrow(1, group.rank() * width[0], width[0]) if tensor.split == 1 else value)
        block[rows:].zero_()  # rows that pad the vocabulary to a multiple of the ranks


def _sharing_group(tensor: HfTensor) -> dist.ProcessGroup:
    """The ranks over which tensor parallelism splits the tensor."""
    if tensor.local_expert is not None:
        return mpu.get_expert_tensor_parallel_group()
    return mpu.get_tensor_model_parallel_group()


def _refuse_unknown(source: TensorFiles, models: list[PolicyModel], model_dir: Path) -> None:
    """`UserError` if the files have weights that Megatron's model would not use: it would compute another function."""
    hf = models[0].hf
    known = {source.stored_name(name) for name in family_of(hf).tensor_names(hf)}
    if models[0].share_embeddings_and_output_weights:
        known.add(LM_HEAD)  # some files store it although it equals the embedding
    unknown = sorted(name for name in set(source.regions) - known if not family_of(hf).copies(hf, name))
    if unknown:
        raise UserError(
            f"{model_dir} has {len(unknown)} tensors that a model of its config.json does not have, such as "
            f"{unknown[0]!r}"
        )


def _check_shape(region: Region, tensor: HfTensor, group: dist.ProcessGroup, name: str, model: PolicyModel) -> None:
    expected = list(tensor.shape)
    if tensor.split is not None:
        expected[tensor.split] *= group.size()
    if name in (family_of(model.hf).embedding, LM_HEAD):
        expected[0] = model.true_vocab_size
    if region.shape != tuple(expected):
        raise UserError(
            f"{region.file.name}: {name} has shape {region.shape}, but config.json requires {tuple(expected)}"
        )


def export_hf(
    models: list[PolicyModel], target: Path, like: Path, version: int, reference: Reference | None = None
) -> PolicyInfo:
    """Write the policy as Hugging Face safetensors to ``target``, atomically; collective over all ranks.

    like: the model directory whose tensor names, dtypes, expert layout, configuration and tokenizer are taken. version:
    of the policy. reference: this policy's log-probs of text of the run, written beside the weights, with which engines
    are checked.
    """
    info: list[Any] = [None]
    if dist.get_rank() == 0:
        with atomic_directory(target) as temporary:
            dist.broadcast_object_list([str(temporary)], src=0)
            if reference is not None:
                write_reference(temporary, reference)
            info = [_merge(_write_files(models, temporary, like), temporary, like, version)]
    else:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0)
        with disk_errors(target):
            _write_files(models, Path(box[0]), like)
    dist.broadcast_object_list(info, src=0)  # no rank returns before the rename
    result: PolicyInfo = info[0]
    return result


def precision(model: PolicyModel, like: Path) -> str:
    """The less precise of two dtypes, the model's and that of the weights stored in ``like``: "float32" only if both
    are, else "bfloat16"."""
    with TensorFiles(weight_files(Path(like))) as source:
        stored = {region.dtype for region in source.regions.values()}
    return "float32" if {model.config.params_dtype, *stored} == {torch.float32} else "bfloat16"


@dataclass(frozen=True)
class _Job:
    """The export of one tensor: this rank's slices of it, and the ranks that hold the others."""

    stored_name: str
    slices: list[HfTensor]  # one, or one for each local expert where experts are fused
    group: dist.ProcessGroup
    writer: int  # rank in ``group`` that writes the tensor


def _jobs(models: list[PolicyModel], source: TensorFiles) -> Iterator[_Job]:
    """The tensors to whose export this rank contributes, in the same order on all ranks of each group.

    Only the first data-parallel replica exports; the ranks of a group take turns as writers.
    """
    slices: dict[str, list[HfTensor]] = {}
    for tensor in hf_tensors(models):
        name = source.stored_name(name_on_this_rank(tensor, models[0]))
        if name is not None:  # None: the lm_head of tied embeddings, where the source leaves it out
            slices.setdefault(name, []).append(tensor)
    for turn, (name, tensors) in enumerate(slices.items()):
        group = _sharing_group(tensors[0])
        replica = mpu.get_data_parallel_rank(with_context_parallel=True)
        if tensors[0].local_expert is not None:
            replica = mpu.get_expert_data_parallel_rank()
            if not name.endswith(".weight"):  # fused: one tensor has the experts of all expert-parallel ranks
                group = mpu.get_expert_tensor_and_model_parallel_group()
        if replica == 0:
            yield _Job(name, tensors, group, turn % group.size())


@torch.no_grad()
def _write_files(models: list[PolicyModel], directory: Path, like: Path) -> list[dict[str, Any]]:
    """Write this rank's tensors. Returns on every rank one entry for each file of all ranks: its file name, tensor
    names, bytes and sha256."""
    with TensorFiles(weight_files(Path(like))) as source, TensorFiles() as target:
        jobs, hf = list(_jobs(models, source)), models[0].hf
        copied = sorted(name for name in source.regions if family_of(hf).copies(hf, name))
        copied = copied[dist.get_rank() :: dist.get_world_size()]
        mine = [job.stored_name for job in jobs if job.group.rank() == job.writer] + copied
        written = []
        for number, names in enumerate(_by_file(mine, source)):
            path = directory / f"part-{dist.get_rank():05d}-{number:05d}.safetensors"
            regions = [source.regions[name] for name in names]
            create_file(path, [(name, r.dtype, r.shape) for name, r in zip(names, regions, strict=True)])
            target.add(path, "r+b")
            written.append({"file": path.name, "names": names, "bytes": sum(region.nbytes for region in regions)})
        for job in jobs:
            for tensor in job.slices:
                _export(tensor, job, source, target, models[0])
        for name in copied:
            source.regions[name].copy_to(target.regions[name], BLOCK_BYTES)
    for entry in written:
        entry["sha256"] = file_sha256(directory / str(entry["file"]))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, written)
    return [entry for rank in everyone for entry in rank]


def _by_file(names: list[str], source: TensorFiles) -> list[list[str]]:
    """Divide consecutive tensors into files of at most MAX_FILE_BYTES; a larger tensor gets a file of its own."""
    files: list[list[str]] = []
    size = MAX_FILE_BYTES
    for name in names:
        if size + source.regions[name].nbytes > MAX_FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += source.regions[name].nbytes
    return files


def _export(tensor: HfTensor, job: _Job, source: TensorFiles, target: TensorFiles, model: PolicyModel) -> None:
    """Gather the tensor block by block and write it; for fused experts, the same local expert of every rank at once."""
    stored, group = source.regions[job.stored_name], job.group
    shares = _sharing_group(tensor).size()
    row_bytes = math.prod(tensor.shape[1:]) * stored.dtype.itemsize
    for first, block in tensor.merged_blocks(max(1, BLOCK_BYTES // (row_bytes * group.size()))):
        # rounded to the nearest, weights would lose updates of less than half a unit in their last place
        if tensor.low_rank or (block.dtype == torch.float32 and stored.dtype.itemsize == 2):
            tied = model.share_embeddings_and_output_weights and tensor.name == LM_HEAD  # the same weights
            name = family_of(model.hf).embedding if tied else job.stored_name
            seed = f"{name} {tensor.local_expert} {group.rank()} {first}"
            block = round_stochastically(block, stored.dtype, seed)
        block = block.to(stored.dtype).contiguous()
        whole = tensor.split is None and group.size() == shares  # every rank has the block itself
        parts = [block] if whole else _gather(block, group, job.writer)
        if group.rank() != job.writer:
            continue
        for rank in range(0, len(parts), shares):  # the parts of one expert, or all parts
            name = tensor.name
            if tensor.local_expert is not None:
                expert_rank = rank // shares if group.size() > shares else mpu.get_expert_model_parallel_rank()
                name = name.format(expert_number(tensor.local_expert, expert_rank, model.config))
            region = target.region(name)
            assert region is not None
            _write(parts[rank : rank + shares], region, tensor, first)


def _write(parts: list[torch.Tensor], region: Region, tensor: HfTensor, first: int) -> None:
    if tensor.split == 1:
        parts = [torch.cat(parts, 1)]
    for rank, part in enumerate(parts):
        row = rank * tensor.shape[0] + first
        rows = max(0, min(part.shape[0], region.shape[0] - row))  # further rows only pad the vocabulary
        region.write(row, part[:rows])


def _gather(block: torch.Tensor, group: dist.ProcessGroup, writer: int) -> list[torch.Tensor]:
    """On ``writer`` the blocks of all ranks, in the order of the group; elsewhere []."""
    if group.size() == 1:
        return [block]
    parts = [torch.empty_like(block) for _ in range(group.size())] if group.rank() == writer else None
    dist.gather(block, parts, group=group, group_dst=writer)
    return parts or []


def _merge(shards: list[dict[str, Any]], directory: Path, like: Path, version: int) -> PolicyInfo:
    """Give the files their final names, write index, configuration and `PolicyInfo`."""
    names, hashes = {}, {}
    for number, shard in enumerate(shards, 1):
        single = len(shards) == 1
        final = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        os.rename(directory / shard["file"], directory / final)
        names.update(dict.fromkeys(shard["names"], final))
        hashes[final] = shard["sha256"]
    copy_auxiliary(like, directory)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(s["bytes"] for s in shards)}, "weight_map": dict(sorted(names.items()))}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")
    info = PolicyInfo(version, combine_hashes(hashes))
    write_info(directory, info)
    return info
