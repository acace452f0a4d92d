"""Updates of an actor on the device, or on the CPU to compare with: what one rank does."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.objectives import build_objective
from tests.actor.layout_ranks import Layout, recipe_of, update_samples, whole_gradient
from tests.rehearsal.counts import Seen, counted


@dataclass(frozen=True)
class Case:
    layout: Layout = field(default_factory=lambda: Layout(1))
    objective: str = "mu_grpo"
    fields: dict[str, Any] = field(default_factory=dict)
    actor: dict[str, Any] = field(default_factory=dict)
    updates: int = 3


@dataclass
class Outcome:
    """What the rank that reports metrics saw; ``gradient`` that of the first update, of the whole model."""

    gradient: dict[str, torch.Tensor]
    metrics: list[dict[str, float]]
    seen: list[Seen]
    micro_batches: int
    reports: bool


def run_updates(rank: int, case: Case, backend: str, model: Path, rollouts: Path, folder: Path) -> Outcome:
    """The first updates of the sealed rollouts, and their gradient."""
    join(rank, case.layout.ranks, backend, folder / f"ranks-{backend}")
    from megarl.actor import packing, parallel, step

    replay = case.actor.get("routing_replay", "none")
    recipe = recipe_of(case.layout, model, actor=case.actor | {"backend": backend})
    parallel.build_groups(recipe)
    actor = build_actor(recipe, model, replay)
    objective = build_objective(case.objective, case.fields)

    def batches(update: int) -> list[Any]:
        samples = update_samples(rollouts, update, replay)
        return packing.micro_batches(samples, recipe.actor.tokens_per_micro_batch, actor.device)

    step.compute_gradients(actor, batches(0), objective)
    gradient = whole_gradient(actor, model, folder / f"gradient-{backend}")
    metrics, seen = [], []
    for update in range(case.updates):
        with counted() as counts:
            packed = batches(update)
            metrics.append(step.train_step(actor, packed, objective, lr=1e-3))
        seen.append(counts)
    reports = parallel.reports_metrics()
    return Outcome(gradient if rank == 0 else {}, metrics, seen, len(batches(0)), reports)


def build_actor(recipe: Any, model: Path, replay: str) -> Any:
    from megarl.actor import frozen, step

    actor = step.Actor.build(recipe, model, device_of(recipe.actor.backend))
    if replay == "actor":
        actor.frozen.append(frozen.FrozenPolicy.build(("routed_experts",), recipe, model))
    return actor


def device_of(backend: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if backend == "cuda" else torch.device("cpu")


def join(rank: int, ranks: int, backend: str, meeting: Path) -> None:
    """As `megarl.actor.parallel.join`, without a launcher."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if backend == "cuda":
        torch.cuda.set_device(rank)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        from megarl.actor import cpu_backend

        cpu_backend.install()
    name = "nccl" if backend == "cuda" else "gloo"
    dist.init_process_group(name, init_method=f"file://{meeting}", rank=rank, world_size=ranks)
