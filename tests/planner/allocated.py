"""Counts the bytes that Megatron-Core allocates on one rank of a layout.

The real model, buffers and optimizer are built on torch's meta device, in a process group that consists of this one
process but claims to have all ranks.

This needs a process of its own because it changes what Megatron sees of torch.
"""

import functools
import tomllib
import warnings

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.actor import cpu_backend, parallel
from megarl.models.hf_config import read_hf_config
from megarl.recipe.load import override_recipe, parse_recipe

ON_META = ("actor.layers=torch", "megatron.init_model_with_meta_device=true", "megatron.perform_initialization=false")


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
            state = [x for values in part.optimizer.state.values() for x in values.values()]
            found["optimizer"] += distinct([*owned, *(x for x in state if isinstance(x, torch.Tensor) and x.dim())])
        return found
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()
