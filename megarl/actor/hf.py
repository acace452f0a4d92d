"""Hugging Face safetensors to Megatron parameters and back, tensor by tensor, for any layout.

Every Megatron parameter is made of one, two (gate, up) or three (query, key, value) Hugging Face tensors; `_recipe_of`
names them and the dimension along which tensor parallelism splits each. Loading reads this rank's slices alone;
exporting gathers one tensor at a time, so no rank ever holds the whole model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from safetensors import safe_open
from safetensors.torch import save_file

from megarl.actor.model import PolicyModel
from megarl.errors import UserError
from megarl.files import atomic_directory
from megarl.policy import PolicyInfo, combine_hashes, copy_auxiliary, file_sha256, weight_files, write_info

MAX_SHARD_BYTES = 4 << 30


@dataclass(frozen=True)
class Source:
    """One Hugging Face tensor of a Megatron parameter."""

    name: str
    split: int | None  # dimension that tensor parallelism splits; None: replicated


_TOP = {
    "embedding.word_embeddings.weight": Source("model.embed_tokens.weight", 0),
    "output_layer.weight": Source("lm_head.weight", 0),
    "decoder.final_layernorm.weight": Source("model.norm.weight", None),
}
_LAYER = {
    "self_attention.linear_proj.weight": (Source("self_attn.o_proj.weight", 1),),
    "self_attention.q_layernorm.weight": (Source("self_attn.q_norm.weight", None),),
    "self_attention.k_layernorm.weight": (Source("self_attn.k_norm.weight", None),),
    "input_layernorm.weight": (Source("input_layernorm.weight", None),),
    "pre_mlp_layernorm.weight": (Source("post_attention_layernorm.weight", None),),
    "mlp.router.weight": (Source("mlp.gate.weight", None),),
    "self_attention.linear_qkv.weight": tuple(Source(f"self_attn.{x}_proj.weight", 0) for x in "qkv"),
    "self_attention.linear_qkv.bias": tuple(Source(f"self_attn.{x}_proj.bias", 0) for x in "qkv"),
    "mlp.linear_fc1.weight": (Source("mlp.gate_proj.weight", 0), Source("mlp.up_proj.weight", 0)),
    "mlp.linear_fc2.weight": (Source("mlp.down_proj.weight", 1),),
}
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")


def _recipe_of(name: str, model: PolicyModel) -> tuple[tuple[Source, ...], bool]:
    """The Hugging Face tensors behind a local parameter name, and whether it belongs to an expert."""
    if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
        name = "embedding.word_embeddings.weight"  # tied, on a last pipeline stage that holds its own copy
    if name in _TOP:
        return (_TOP[name],), False
    _, _, layer, rest = name.split(".", 3)  # decoder.layers.<local>.<rest>
    prefix = f"model.layers.{model.decoder.layers[int(layer)].layer_number - 1}."
    expert = _EXPERT.fullmatch(rest)
    if expert is None:
        return tuple(Source(prefix + s.name, s.split) for s in _LAYER[rest]), False
    per_rank = model.config.num_moe_experts // mpu.get_expert_model_parallel_world_size()
    index = int(expert[1]) + per_rank * mpu.get_expert_model_parallel_rank()
    kinds, split = (("gate", "up"), 0) if expert[2] == "1" else (("down",), 1)
    return tuple(Source(f"{prefix}mlp.experts.{index}.{kind}_proj.weight", split) for kind in kinds), True


def _tensor_group(is_expert: bool) -> dist.ProcessGroup:
    return mpu.get_expert_tensor_parallel_group() if is_expert else mpu.get_tensor_model_parallel_group()


def _join(parts: list[torch.Tensor], model: PolicyModel) -> torch.Tensor:
    """Hugging Face parts (this rank's slices) to one Megatron parameter."""
    if len(parts) == 3:  # query, key, value interleaved by query group
        groups = parts[1].size(0) // model.config.kv_channels
        parts = [part.view(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(parts, 1).flatten(0, 1)
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _split(parameter: torch.Tensor, count: int, model: PolicyModel) -> list[torch.Tensor]:
    """Inverse of `_join`."""
    if count == 3:
        config = model.config
        queries = config.num_attention_heads // config.num_query_groups
        grouped = parameter.view(-1, (queries + 2) * config.kv_channels, *parameter.shape[1:])
        sizes = [queries * config.kv_channels, config.kv_channels, config.kv_channels]
        return [part.flatten(0, 1) for part in grouped.split(sizes, 1)]
    return list(parameter.chunk(count))


class _Reader:
    """Slices of named tensors out of a directory of safetensors; knows fused expert tensors too."""

    def __init__(self, model_dir: Path) -> None:
        self.directory = model_dir
        self.files = {}
        for path in weight_files(model_dir):
            try:
                handle = safe_open(path, framework="pt")
            except Exception as error:  # safetensors raises its own Rust-side exception type
                raise UserError(f"{path} is not a readable safetensors file: {error}") from error
            self.files.update(dict.fromkeys(handle.keys(), handle))

    def slice(self, source: Source, rank: int, size: int) -> torch.Tensor:
        """Part ``rank`` of ``size`` along ``source.split``; zero rows pad a vocabulary to a multiple of size."""
        view = self._view(source.name)
        if source.split is None or size == 1:
            return view[:]
        length = (view.shape if isinstance(view, torch.Tensor) else view.get_shape())[source.split]
        step = -(-length // size)
        begin, end = min(rank * step, length), min((rank + 1) * step, length)
        part = view[begin:end] if source.split == 0 else view[:, begin:end]
        if end - begin < step:
            part = torch.cat([part, part.new_zeros(step - (end - begin), *part.shape[1:])])
        return part

    def _view(self, name: str) -> Any:
        if name in self.files:
            return self.files[name].get_slice(name)
        fused = re.fullmatch(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        stacked = f"{fused[1]}.{'down_proj' if fused[3] == 'down' else 'gate_up_proj'}" if fused else ""
        if fused is None or stacked not in self.files:
            raise UserError(f"{self.directory} has no tensor {name!r}: its config.json does not fit its weights")
        one = self.files[stacked].get_slice(stacked)[int(fused[2])]
        return one if fused[3] == "down" else one.chunk(2)[("gate", "up").index(fused[3])]


@torch.no_grad()
def load_hf(models: list[PolicyModel], model_dir: Path) -> None:
    """Fill this rank's model chunks from a Hugging Face directory; `UserError` on a missing or misshapen tensor."""
    reader = _Reader(Path(model_dir))
    for model in models:
        for name, parameter in model.named_parameters():
            sources, is_expert = _recipe_of(name, model)
            group = _tensor_group(is_expert)
            value = _join([reader.slice(s, group.rank(), group.size()) for s in sources], model)
            if value.shape != parameter.shape:
                raise UserError(
                    f"{model_dir}: {sources[0].name} gives shape {tuple(value.shape)} for {name}, "
                    f"but config.json asks for {tuple(parameter.shape)}"
                )
            parameter.copy_(value)


@torch.no_grad()
def _gathered(models: list[PolicyModel]) -> Iterator[tuple[str, torch.Tensor]]:
    """Full Hugging Face tensors, yielded on one rank of each tensor-parallel group and one data-parallel replica."""
    for model in models:
        for name, parameter in model.named_parameters():
            sources, is_expert = _recipe_of(name, model)
            if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
                continue  # tied: the embedding is exported once
            group = _tensor_group(is_expert)
            replica = mpu.get_expert_data_parallel_rank() if is_expert else mpu.get_data_parallel_rank(True)
            for source, part in zip(sources, _split(parameter.detach(), len(sources), model), strict=True):
                if source.split is not None and group.size() > 1:
                    pieces = [torch.empty_like(part) for _ in range(group.size())]
                    dist.all_gather(pieces, part.contiguous(), group=group)
                    part = torch.cat(pieces, source.split)
                if "embed_tokens" in source.name or "lm_head" in source.name:
                    part = part[: model.true_vocab_size]
                if group.rank() == 0 and replica == 0:
                    yield source.name, part.cpu().contiguous().clone()


def export_hf(models: list[PolicyModel], target: Path, like: Path, version: int) -> PolicyInfo:
    """Write the policy as Hugging Face safetensors to ``target``, atomically; collective over all ranks.

    Configuration and tokenizer come from ``like``. Every rank that holds parameters writes shards of its own.
    """
    info: list[Any] = [None]
    if dist.get_rank() == 0:
        with atomic_directory(target) as temporary:
            dist.broadcast_object_list([str(temporary)], src=0)
            info = [_merge(_write_shards(models, temporary), temporary, like, version)]
    else:
        box: list[Any] = [None]
        dist.broadcast_object_list(box, src=0)
        _write_shards(models, Path(box[0]))
    dist.broadcast_object_list(info, src=0)  # nobody goes on before the rename
    result: PolicyInfo = info[0]
    return result


def _write_shards(models: list[PolicyModel], directory: Path) -> list[dict[str, Any]]:
    """Write this rank's tensors; returns, on every rank, one entry a shard of all ranks: file, names, bytes, sha256."""
    shards: list[dict[str, Any]] = []
    pending: dict[str, torch.Tensor] = {}
    size = 0

    def flush() -> None:
        nonlocal pending, size
        if pending:
            file = f"part-{dist.get_rank():05d}-{len(shards):05d}.safetensors"
            save_file(dict(sorted(pending.items())), directory / file, metadata={"format": "pt"})
            digest = file_sha256(directory / file)
            shards.append({"file": file, "names": sorted(pending), "bytes": size, "sha256": digest})
            pending, size = {}, 0

    for name, tensor in _gathered(models):
        if size + tensor.nbytes > MAX_SHARD_BYTES:
            flush()
        pending[name] = tensor
        size += tensor.nbytes
    flush()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, shards)
    return [shard for rank in everyone for shard in rank]


def _merge(shards: list[dict[str, Any]], directory: Path, like: Path, version: int) -> PolicyInfo:
    """Give the shards their final names, write index, configuration and `PolicyInfo`."""
    names, hashes = {}, {}
    for number, shard in enumerate(shards, 1):
        one = len(shards) == 1
        final = "model.safetensors" if one else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        os.rename(directory / shard["file"], directory / final)
        names.update(dict.fromkeys(shard["names"], final))
        hashes[final] = shard["sha256"]
    copy_auxiliary(like, directory)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(s["bytes"] for s in shards)}, "weight_map": dict(sorted(names.items()))}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    info = PolicyInfo(version, combine_hashes(hashes))
    write_info(directory, info)
    return info
