"""Sets up torch.distributed and Megatron's process groups for one rank that trains."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from megarl.distributed import Role, collective_timeout, join_process_group
from megarl.recipe.tables import Recipe


def initialize(recipe: Recipe) -> torch.device:
    """Join the process group that the launcher prepared and build Megatron's groups; returns this rank's device."""
    return join(recipe)[0]


def join(recipe: Recipe, role: Role | None = None) -> tuple[torch.device, dist.Store]:
    """As `initialize`, with a process group of the processes of one ``role``; also returns the store that all processes
    of the phase share."""
    device = torch.device("cpu")
    if recipe.actor.backend == "cuda":
        _prepare_cuda(recipe)
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        from megarl.actor import cpu_backend

        cpu_backend.install()
    store = join_process_group("gloo" if recipe.actor.backend == "cpu" else "nccl", role)
    build_groups(recipe, gloo=recipe.actor.backend == "cpu")
    return device, store


def _prepare_cuda(recipe: Recipe) -> None:
    """Set variables that CUDA and torch's allocator read when they are first used; existing variables are kept."""
    actor = recipe.actor
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & set(os.environ):
        # micro-batches differ in length, so fixed segments would fragment
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    if actor.tensor_parallel > 1 or actor.context_parallel > 1:
        # with one hardware queue a collective starts before the computation that is launched after it
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def build_groups(recipe: Recipe, gloo: bool = True) -> None:
    """Create Megatron's process groups for the recipe's layout over all ranks, and seed its random state.

    gloo: whether to create gloo groups in addition to those of the default backend.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    actor = recipe.actor
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=actor.tensor_parallel,
        pipeline_model_parallel_size=actor.pipeline_parallel,
        virtual_pipeline_model_parallel_size=recipe.virtual_pipeline_stages,
        context_parallel_size=actor.context_parallel,
        expert_model_parallel_size=actor.expert_parallel,
        expert_tensor_parallel_size=actor.expert_tensor_parallel or actor.tensor_parallel,
        create_gloo_process_groups=gloo,
        distributed_timeout_minutes=max(1, collective_timeout() // timedelta(minutes=1)),
    )
    torch.manual_seed(recipe.run.seed)
    model_parallel_cuda_manual_seed(recipe.run.seed)


def reports_metrics() -> bool:
    """True on the one rank that writes metrics: the first tensor- and data-parallel rank of the last pipeline stage,
    which knows the loss."""
    from megatron.core import parallel_state as mpu

    first = mpu.get_tensor_model_parallel_rank() == 0 and mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    return first and mpu.is_pipeline_last_stage()


def data_parallel_ranks() -> int:
    """Number of data-parallel replicas, which train different sequences."""
    from megatron.core import parallel_state as mpu

    return int(mpu.get_data_parallel_world_size())
