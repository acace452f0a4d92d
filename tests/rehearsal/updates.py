"""Updates of an actor on CUDA devices, and on the CPU for comparison: what each rank does."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.objectives import build_objective
from megarl.recipe import layout as parallelism
from tests.actor.conftest import make_hf_model, read_settings
from tests.actor.layout_ranks import Layout, adapter_gradient, recipe_of, seal_rollouts, update_samples, whole_gradient
from tests.gpu.memory import fill_free_memory_with_nan
from tests.rehearsal.branches import branches, many_pieces
from tests.rehearsal.forks import in_ranks

# tolerances of bfloat16: relative, in nats per token, relative; see `tests/rehearsal/on_device/test_updates.py`
GRADIENT, LOSS, NORM = 0.05, 3e-3, 0.02
LAYERS = 4
EVERY_LAYOUT = "MEGARL_EVERY_LAYOUT" in os.environ  # every family in every layout that it fits


# where master weights, moments and Adam are: Megatron's HybridDeviceOptimizer offloads a share of them
HOST = {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
OPTIMIZERS = {"device": {}, "host": HOST, "half": HOST | {"optimizer_offload_fraction": 0.5}}


@dataclass(frozen=True)
class Case:
    layout: Layout = field(default_factory=lambda: Layout(1))
    objective: str = "mu_grpo"
    fields: dict[str, Any] = field(default_factory=dict)
    actor: dict[str, Any] = field(default_factory=dict)
    updates: int = 3
    family: str = "qwen3_moe"  # of `tests.actor.conftest`
    # whether the thresholds of `tests.rehearsal.branches` are those that cut a tiny model into many pieces
    many_pieces: bool = True
    bucket_size: int | None = 1  # of Megatron's DDP, parameters; None: Megatron's default
    saved_after: int | None = None  # updates, of which those after them are made again from a checkpoint
    optimizer: str = "device"  # of `OPTIMIZERS`
    others: tuple[str, ...] = ()  # of `OPTIMIZERS`, with which they are made again too


@dataclass
class Outcome:
    """Results of one rank, or of several (`outcome_of`)."""

    gradient: dict[str, torch.Tensor]  # of the first update and the whole model, on the first rank alone
    metrics: list[dict[str, float]]
    seen: list[Any]  # what ``counted()`` gave for each update
    micro_batches: int
    reports: bool  # whether this rank reports metrics
    branches: set[str]  # `tests.rehearsal.branches`


@dataclass
class Distance:
    gradient: float  # relative to its length
    losses: list[tuple[float, float]]
    norms: list[tuple[float, float]]

    @classmethod
    def between(cls, ours: Outcome, theirs: Outcome) -> Distance:
        assert ours.gradient.keys() == theirs.gradient.keys()
        difference = sum(float((ours.gradient[k].float() - g).square().sum()) for k, g in theirs.gradient.items())
        size = sum(float(g.square().sum()) for g in theirs.gradient.values())
        pairs = list(zip(ours.metrics, theirs.metrics, strict=False))
        losses, norms = ([(a[key], b[key]) for a, b in pairs] for key in ("loss", "grad_norm"))
        return cls((difference / size) ** 0.5, losses, norms)

    def tolerable(self, factor: float = 1) -> bool:
        return (
            self.gradient < GRADIENT * factor
            and all(abs(a - b) <= LOSS * factor for a, b in self.losses)
            and all(abs(a - b) <= NORM * factor * b for a, b in self.norms)
        )


def layers_of(family: str) -> int:
    return LAYERS if family == "qwen3_moe" or EVERY_LAYOUT else LAYERS - 1


def fits(family: str, layout: Layout) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        hf = read_settings(Path(folder), family, num_hidden_layers=layers_of(family))
        wanted = parallelism.Layout.of(recipe_of(layout, Path(folder)), layout.ranks)
    return not any(wanted.problems(hf))


def seal(family: str, folder: Path) -> None:
    """Write a model that is exact in bfloat16, and rollouts of a policy near it."""
    model = make_hf_model(family, num_hidden_layers=layers_of(family), initializer_range=0.1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer *= 10  # larger than differences of scores: between two nearly equal ones rounding would decide
    model = model.bfloat16().float()
    model.save_pretrained(folder / "model")
    seal_rollouts(model, folder / "rollouts", updates=4)


def outcome_of(
    case: Case, backend: str, sealed: Path, counted: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Outcome:
    with tempfile.TemporaryDirectory() as name:

        def rank(rank: int) -> Outcome:
            with many_pieces() if case.many_pieces and backend == "cuda" else nullcontext():
                return make_updates(rank, case, backend, sealed, Path(name), counted)

        results = in_ranks(rank, case.layout.ranks)
    (reporting,) = [result for result in results if result.reports]
    taken = set().union(*(result.branches for result in results))
    return replace(reporting, gradient=results[0].gradient, branches=taken)


def make_updates(
    rank: int, case: Case, backend: str, sealed: Path, folder: Path, counted: Callable[[], AbstractContextManager[Any]]
) -> Outcome:
    """The gradient of the first update from the sealed rollouts, then the updates, each inside ``counted()``."""
    model, rollouts = sealed / "model", sealed / "rollouts"
    join(rank, case.layout.ranks, backend, folder / "ranks")
    if backend == "cuda":
        fill_free_memory_with_nan()
    from megarl.actor import frozen, packing, parallel, step

    replay = case.actor.get("routing_replay", "none")
    # a bucket for each parameter, as the head of a model of true size has one: Megatron waits for each on its own
    ddp = {} if case.bucket_size is None else {"bucket_size": case.bucket_size}

    def build(optimizer: str) -> Any:
        tables = {"actor": case.actor | {"backend": backend}, "megatron_ddp": ddp}
        tables["megatron_optimizer"] = OPTIMIZERS[optimizer] if backend == "cuda" else {}
        recipe = recipe_of(case.layout, model, **tables)
        actor = step.Actor.build(recipe, model, device_of(backend))
        if replay == "actor":
            actor.frozen.append(frozen.FrozenPolicy.build(("routed_experts",), recipe, model))
        return actor

    recipe = recipe_of(case.layout, model, actor=case.actor | {"backend": backend})
    parallel.build_groups(recipe)
    actor = build(case.optimizer)
    objective = build_objective(case.objective, case.fields)

    def batches(update: int) -> list[Any]:
        samples = update_samples(rollouts, update, replay)
        share = actor.models[0].shares_prompts
        return packing.micro_batches(samples, recipe.actor.tokens_per_micro_batch, actor.device, share=share)

    step.compute_gradients(actor, batches(0), objective)
    if recipe.actor.lora is None:
        gradient = whole_gradient(actor, model, folder / "gradient")
    else:
        gradient = adapter_gradient(actor)

    def train(actor: Any, updates: range) -> list[dict[str, float]]:
        metrics = []
        for update in updates:
            with counted() as counts:
                packed = batches(update)
                metrics.append(step.train_step(actor, packed, objective, lr=1e-3))
            seen.append(counts)
        return metrics

    seen: list[Any] = []
    if case.saved_after is None or backend != "cuda":
        metrics = train(actor, range(case.updates))
    else:
        metrics = train_twice(case, actor, build, train, folder)
    samples = update_samples(rollouts, 0)
    longest, response = max(map(len, samples)), max(len(sample.response_tokens) for sample in samples)
    return Outcome(
        gradient if rank == 0 else {},
        metrics,
        seen,
        len(batches(0)),
        parallel.reports_metrics(),
        branches(recipe, actor.models, actor.replicas, longest, response) if backend == "cuda" else set(),
    )


def train_twice(case: Case, actor: Any, build: Any, train: Any, folder: Path) -> list[dict[str, float]]:
    """The updates of a case; those after its checkpoint are made again from it, and give the same bits."""
    from megarl.actor import checkpoint, hf
    from megarl.actor.optimizer import gather_parameters
    from megarl.phases.rehearse import compare_export

    first, others = range(case.saved_after), range(case.saved_after, case.updates)
    metrics = train(actor, first)
    path = checkpoint.save(actor, folder / "checkpoints", case.saved_after, keep=1, wait=False)
    metrics += train(actor, others)  # while the checkpoint is written
    checkpoint.finish(actor)
    gather_parameters(actor.replicas)
    if actor.recipe.actor.lora is None:
        hf.export_hf(actor.models, folder / "export", actor.recipe.model.path, case.updates)
        compare_export(actor, folder / "export")  # which the actor has from now on
    resumed = build(case.optimizer)
    assert checkpoint.load(resumed, path) == case.saved_after
    assert train(resumed, others) == metrics[case.saved_after :]
    gather_parameters(resumed.replicas)
    for ours, again in zip(actor.models, resumed.models, strict=True):
        assert all(torch.equal(*pair) for pair in zip(ours.parameters(), again.parameters(), strict=True))
    check_place(resumed, case.optimizer)
    for other in case.others:  # within Adam's rounding
        changed = build(other)
        assert checkpoint.load(changed, path) == case.saved_after
        for ours, theirs in zip(train(changed, others), metrics[case.saved_after :], strict=True):
            assert abs(ours["loss"] - theirs["loss"]) <= LOSS
            assert abs(ours["grad_norm"] - theirs["grad_norm"]) <= NORM * theirs["grad_norm"]
        check_place(changed, other)
    return metrics


def check_place(actor: Any, optimizer: str) -> None:
    from megarl.actor.optimizer_state import distributed_optimizers

    states = [s for part in distributed_optimizers(actor.optimizer) for s in part.optimizer.state.values()]
    names = ("exp_avg", "exp_avg_sq", *(["master_param"] if optimizer != "device" else []))
    tensors = [state[key] for state in states for key in names]
    assert {x.dtype for x in tensors} == {torch.float32}
    on_host = sum(x.numel() for x in tensors if not x.is_cuda) / sum(x.numel() for x in tensors)
    assert {"host": on_host == 1, "half": 0.4 < on_host < 0.9, "device": on_host == 0}[optimizer], on_host


def device_of(backend: str) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if backend == "cuda" else torch.device("cpu")


def join(rank: int, ranks: int, backend: str, meeting: Path) -> None:
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
