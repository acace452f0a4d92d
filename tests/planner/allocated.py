"""Counts the bytes that Megatron-Core allocates on one rank of a layout.

The real model, buffers and optimizer are built on torch's meta device, in a process group that consists of this one
process but claims to have all ranks.

This needs a process of its own because it changes what Megatron sees of torch.
"""

import functools
import tomllib
import warnings
import weakref

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.actor import cpu_backend, parallel
from megarl.models.hf_config import read_hf_config
from megarl.recipe.load import override_recipe, parse_recipe

ON_META = ("actor.layers=torch", "megatron.init_model_with_meta_device=true", "megatron.perform_initialization=false")


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that operators create, now and at the peak; those of ``known`` are left out."""

    def __init__(self, known):
        super().__init__()
        self.now = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage):
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())

    def _drop(self, key, size):
        self.known.discard(key)
        self.now -= size


def distinct(tensors):
    """Bytes of the storages behind the tensors; a storage that several of them share counts once."""
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


@functools.cache
def prepare():
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    cpu_backend.install(torch.device("meta"))


def allocated(folder, text, ranks, rank):
    """{kind: bytes}. folder: that of config.json. text: of the recipe."""
    prepare()
    recipe = override_recipe(parse_recipe(tomllib.loads(text)), ON_META)
    from megatron.core import parallel_state as mpu

    from megarl.actor import lora
    from megarl.actor.model import build_model
    from megarl.actor.optimizer import wrap
    from megarl.actor.optimizer_state import distributed_optimizers

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        parallel.build_groups(recipe, gloo=False)
        with torch.device("meta"):
            models = build_model(read_hf_config(folder), recipe)
            lora.attach(models, recipe)
        replicas, optimizer = wrap(models, recipe)
        buffers = [b for replica in replicas for b in replica.buffers + replica.expert_parallel_buffers]
        weights = [p.data for model in models for p in model.parameters()]
        found = {
            "weights": distinct([*weights, *(b.param_data for b in buffers if b.param_data is not None)]),
            "gradients": distinct([b.grad_data for b in buffers]),
            "optimizer": 0,
        }
        largest = max(parameter.numel() for model in models for parameter in model.parameters())
        for part in distributed_optimizers(optimizer):
            groups = part.optimizer.param_groups
            owned = [p for group in groups for p in group["params"]]
            assert not any(group["foreach"] for group in groups)  # torch would choose it on GPUs if it were None
            assert all(group["fused"] for group in groups)
            for group in groups:  # the meta device has no such kernel
                group["fused"] = False
            for parameter in owned:
                parameter.grad = torch.empty_like(parameter)
            part.optimizer.step()
            state = [*owned, *_tensors(part.optimizer.state)]
            found["optimizer"] += distinct(state)
            with Live([*state, *(p.grad for p in owned)]) as live:
                part.optimizer.step()
            assert live.peak <= 3 * 4 * largest  # the optimizer steps one parameter at a time
        return found
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


def _tensors(state):
    return [t for values in state.values() for t in values.values() if isinstance(t, torch.Tensor) and t.dim()]
