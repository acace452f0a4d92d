"""Memory and time of every phase of a recipe on some GPUs, or the first thing that does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from megarl.objectives import WithOptions, build_objective
from megarl.planner import sizes
from megarl.planner.assumptions import GIB, Assumptions
from megarl.planner.disk import disk_bytes
from megarl.planner.parameter_counts import ParameterCounter, StageParameters
from megarl.planner.sizes import GPUS, Gpu
from megarl.recipe.layout import Layout
from megarl.recipe.optimizer import OptimizerBytes
from megarl.recipe.tables import Recipe


@dataclass(frozen=True)
class Plan:
    """Sizes (bytes) and times (seconds) of one recipe on ``nodes`` nodes."""

    recipe: Recipe
    hf: dict[str, Any]
    nodes: int
    gpu: str
    layout: Layout
    whole: StageParameters
    stages: list[StageParameters]
    assume: Assumptions = field(default_factory=Assumptions)
    hbm: float | None = None  # bytes of a GPU; default: those of ``gpu``

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        hf: dict[str, Any],
        nodes: int,
        gpu: str,
        counter: ParameterCounter,
        whole: StageParameters | None = None,
        assume: Assumptions | None = None,
        hbm: float | None = None,
    ) -> Plan:
        layout = Layout.of(recipe, nodes * recipe.actor.processes_per_node)
        stages = counter.count(hf, recipe, layout.ranks)
        whole = whole or counter.whole(hf, recipe)
        return cls(recipe, hf, nodes, gpu, layout, whole, stages, assume or Assumptions(), hbm)

    @property
    def device(self) -> Gpu:
        """The GPU; its memory is ``hbm`` if that is set."""
        kind = GPUS[self.gpu]
        return kind if self.hbm is None else replace(kind, memory=self.hbm)

    @property
    def parameters(self) -> int:
        return self.whole.dense + self.whole.expert

    @cached_property
    def frozen(self) -> int:
        """Number of frozen policies that the objective needs; each is one more model on the same ranks."""
        objective = build_objective(self.recipe.objective.name, self.recipe.objective.fields)
        options = objective.options if isinstance(objective, WithOptions) else ()
        return len({name for option in options for name in option.requires} & {"ref_logprobs", "old_logprobs"})

    @cached_property
    def extra_passes(self) -> float:
        """Forward passes of an update that have no backward pass.

        The proximal policy of a step needs such a pass for every update of the step except the first.
        """
        objective = build_objective(self.recipe.objective.name, self.recipe.objective.fields)
        exact = objective.needs_statistics and self.recipe.actor.statistics_scope == "exact"
        return self.frozen + int(exact) + 1 - 1 / objective.updates_per_proximal_policy

    @cached_property
    def optimize(self) -> dict[str, float]:
        """Bytes on a GPU of the pipeline stage that needs most memory, by what holds them."""
        return max(map(self.optimize_stage, range(len(self.stages))), key=lambda items: sum(items.values()))

    def optimize_stage(self, stage: int) -> dict[str, float]:
        counts, gpu = self.stages[stage], self.device
        return sizes.optimize_memory(self.hf, self.recipe, self.layout, stage, counts, self.frozen, gpu, self.assume)

    @cached_property
    def optimizer_on_host(self) -> float:
        """Bytes of host memory for the optimizer, on the node that needs most."""
        owned = max(sizes.owned_parameters(self.layout, stage) for stage in self.stages)
        return OptimizerBytes.of(self.recipe).host * owned * self.recipe.actor.processes_per_node

    @property
    def usable(self) -> float:
        """Bytes of a GPU that the optimize phase can fill."""
        return self.device.memory * (1 - self.assume.fragmentation)

    @cached_property
    def rollout(self) -> dict[str, float]:
        return sizes.rollout_memory(self.hf, self.recipe, self.parameters, self.device, self.assume)

    @property
    def engine_share(self) -> float:
        """Bytes of a GPU that an engine fills."""
        return sizes.engine_share(self.hf, self.recipe, self.device, self.assume)

    @property
    def kv_tokens(self) -> int:
        """Tokens that fit in the KV cache of a replica."""
        per_token = sizes.kv_bytes_per_token(self.hf, self.recipe.rollout.tensor_parallel)
        return int(self.rollout["KV cache"] / per_token)

    @property
    def side_by_side(self) -> bool:
        """Whether engines and trainers use different GPUs."""
        return self.recipe.schedule.kind == "live" and not self.recipe.schedule.colocate

    @property
    def overlaps(self) -> bool:
        """Whether engines generate while trainers train; in lock-step each waits for the other."""
        return self.side_by_side and not self.recipe.schedule.lockstep

    def misfit(self) -> str | None:
        """The first item that does not fit, in the order in which a run allocates memory; None if everything fits."""
        return self.rollout_misfit() or self.optimize_misfit() or self.shared_misfit()

    def rollout_misfit(self) -> str | None:
        table, available = self.recipe.rollout, self.recipe.actor.processes_per_node
        wanted = table.workers * table.tensor_parallel
        if wanted > available and not self.side_by_side:
            return (
                f"rollout.workers * rollout.tensor_parallel = {wanted} GPUs a node, "
                f"but actor.processes_per_node = {available}"
            )
        memory, whole = self.engine_share, self.device.memory
        if memory > whole:
            return (
                f"rollout.memory_fraction = {table.memory_fraction}: SGLang's share is of weights and KV cache alone; "
                f"with activations and CUDA graphs an engine takes {_gib(memory)} of a GPU's {_gib(whole)}"
            )
        used = sum(self.rollout.values()) - self.rollout["KV cache"]
        if used > memory:
            share = f"{memory / whole:.0%} of a GPU are {_gib(memory)}"
            return f"weights of a rollout engine: {_gib(used)} with its activations, but {share}"
        longest = sizes.longest_sequence(self.recipe)
        if self.kv_tokens < longest:
            return (
                f"KV cache of a rollout engine: room for {self.kv_tokens} tokens, but one response of full length "
                f"with its prompt has {longest}"
            )
        return None

    def optimize_misfit(self) -> str | None:
        total, memory = 0.0, self.usable
        for name, size in self.optimize.items():
            if total + size > memory:
                left = f"only {_gib(memory - total)} of {_gib(memory)} are left"
                return f"optimize phase, {name}: {_gib(size)} on a GPU, but {left}"
            total += size
        return None

    @property
    def left_to_engines(self) -> float:
        """Bytes of a GPU that trainers in memory leave to an engine on the same GPU."""
        return self.usable - sum(self.optimize.values())

    def shared_misfit(self) -> str | None:
        """Why engines do not fit in the memory that trainers leave with ``schedule.colocate``; None if they do."""
        if not self.recipe.schedule.colocate or self.engine_share <= self.left_to_engines:
            return None
        return (
            f"schedule.colocate: engines have {_gib(self.engine_share)} of a GPU, but trainers, which stay in memory, "
            f"leave {_gib(self.left_to_engines)}: lower rollout.memory_fraction"
        )

    def table(self) -> str:
        """The whole plan as text."""
        return "\n".join(
            [*self._heading(), "", *self._memory(), "", *self._disk(), "", *self._time(), "", *self._assumed()]
        )

    def record(self) -> dict[str, Any]:
        """The plan for programs, as JSON values: bytes on a GPU or disk, seconds of a stage."""
        table = self.recipe.rollout
        return {
            "model_type": self.hf["model_type"],
            "parameters": self.parameters,
            "active_parameters": sizes.active_parameters(self.hf, self.parameters),
            "gpu": self.gpu,
            "nodes": self.nodes,
            "layout": asdict(self.layout),
            "pipeline_stages": [asdict(stage) for stage in self.stages],
            "rollout": {
                "replicas": self.nodes * table.workers,
                "bytes": self.rollout,
                "engine_bytes": self.engine_share,
                "kv_tokens": self.kv_tokens,
            },
            "optimize": {"bytes": self.optimize, "usable_bytes": self.usable, "host_bytes": self.optimizer_on_host},
            "disk_bytes": self.disk,
            "stage_seconds": self.seconds,
            "run_seconds": self.stage_seconds * self.recipe.schedule.stages,
            "assumed": asdict(self.assume) | {"hbm_bytes": self.device.memory},
            "misfit": self.misfit(),
        }

    def _heading(self) -> Iterator[str]:
        active = sizes.active_parameters(self.hf, self.parameters)
        routed = f", {active / 1e9:.1f} B active" if self.hf["num_experts"] else ""
        ranks, actor = f"{self.nodes} x {self.recipe.actor.processes_per_node} {self.gpu}", self.layout
        if self.side_by_side:
            engines = self.recipe.rollout.workers * self.recipe.rollout.tensor_parallel
            ranks += f" of trainers, {self.nodes} x {engines} of engines"
        again = self.recipe.actor.recompute
        yield f"{self.hf['model_type']}, {self.parameters / 1e9:.2f} B parameters{routed}; {ranks}"
        yield (
            f"layout: tensor {actor.tensor_parallel}, pipeline {actor.pipeline_parallel}, "
            f"context {actor.context_parallel}, expert {actor.expert_parallel} x {actor.expert_tensor_parallel}, "
            f"data {sizes.data_parallel(actor)} (experts {sizes.expert_data_parallel(actor)}); "
            f"recompute {again if isinstance(again, str) else ', '.join(again)}"
        )
        for number, stage in enumerate(self.stages):
            count = f"{(stage.dense + stage.expert) / 1e6:.1f} M parameters a rank"
            experts = f", {stage.expert / 1e6:.1f} M of them experts" if stage.expert else ""
            adapters = f", and {stage.adapters / 1e6:.1f} M of adapters" if stage.adapters else ""
            yield f"  pipeline stage {number}: {stage.layers} layers, {count}{experts}{adapters}"

    def _memory(self) -> Iterator[str]:
        table = self.recipe.rollout
        yield f"rollout, GiB on each GPU ({self.nodes * table.workers} replicas of {table.tensor_parallel})"
        yield from _rows(self.rollout, "share of the engine", self.engine_share)
        longest = sizes.longest_sequence(self.recipe)
        yield f"  room for {self.kv_tokens:,} tokens, {self.kv_tokens / longest:.1f} responses of full length"
        allowed, gpu = sizes.engine_responses(self.recipe), self.device
        running = sizes.running_responses(self.hf, self.recipe, self.parameters, self.nodes, gpu, self.assume)
        yield f"  {running:,.0f} responses decode together, on average; groups_per_chunk allows {allowed:,}"
        yield from self._preemption(allowed)
        yield ""
        yield f"optimize, GiB on each GPU ({sizes.micro_batch_tokens(self.recipe):,} tokens in the largest micro-batch)"
        yield from _rows(self.optimize, f"of this GPU, {1 - self.assume.fragmentation:.0%}", self.usable)
        if self.optimizer_on_host:
            yield _row("and in a node's host memory: optimizer", self.optimizer_on_host)
            yield "  (the time of Adam on the host is not in the estimate below)"

    def _preemption(self, allowed: int) -> Iterator[str]:
        """Whether the KV cache holds all responses that a replica is asked for.

        If they do not fit at the mean length, some wait; if they grow longer than the mean, the engine evicts some.
        """
        recipe, gpu = self.recipe, self.device
        asked = min(allowed, math.ceil(sizes.responses_of_version(recipe, self.nodes)))
        mean, longest = sizes.mean_sequence(recipe, self.assume), sizes.longest_sequence(recipe)
        fit, at_worst = (
            int(sizes.responses_that_fit(self.hf, recipe, self.parameters, gpu, self.assume, tokens))
            for tokens in (mean, longest)
        )
        if asked <= at_worst:
            yield "  all of them fit at full length: none is evicted from the cache and computed again"
        elif asked <= fit:
            yield f"  {at_worst:,} fit at full length: beyond the mean length some are evicted and computed again"
        else:
            groups = max(1, fit // recipe.rollout.responses_per_prompt)
            yield f"  warning: of {asked:,} responses {fit:,} fit in the cache at the mean length; the others wait"
            yield f"  rollout.groups_per_chunk={groups} fits; with more tensor_parallel or another GPU more would fit"

    def _disk(self) -> Iterator[str]:
        yield "disk, GiB"
        for name, size in self.disk.items():
            yield _row(name, size)

    @property
    def update_seconds(self) -> float:
        return self.seconds_of_update(0.0)

    def seconds_of_update(self, more: float) -> float:
        """Seconds of an update with ``more`` forward passes in addition to those that the objective needs."""
        recipe, passes = self.recipe, self.extra_passes + more
        return sizes.optimize_seconds(self.hf, recipe, self.layout, self.parameters, passes, self.device, self.assume)

    @cached_property
    def disk(self) -> dict[str, float]:
        """Bytes on disk, by kind of file."""
        return disk_bytes(self.hf, self.recipe, self.parameters, self.assume, self.whole.trained)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Estimated seconds of each part of a stage."""
        recipe, gpu, assume = self.recipe, self.device, self.assume
        update, updates, disk = self.update_seconds, recipe.schedule.updates_per_stage, self.disk
        checkpoints = math.ceil(updates / recipe.actor.checkpoint_every)
        replicas = self.nodes * recipe.rollout.workers
        versions = sizes.versions_of_stage(recipe)
        load = sizes.load_seconds(recipe, self.parameters, replicas, assume)
        return {
            "load of the engines" if versions == 1 else f"{versions} loads of the engines": load,
            "rollouts": sizes.rollout_seconds(self.hf, recipe, self.parameters, self.nodes, gpu, assume),
            f"{updates} updates of {update:.1f} s": update * updates,
            f"{checkpoints} checkpoints": checkpoints * disk["one checkpoint"] / assume.storage,
            "export" if versions == 1 else f"{versions} exports": versions * disk["one export"] / assume.storage,
        }

    @property
    def stage_seconds(self) -> float:
        load, rollouts, *training = self.seconds.values()
        both = load + rollouts, sum(training)
        return max(both) if self.overlaps else sum(both)

    def _time(self) -> Iterator[str]:
        stages = self.recipe.schedule.stages
        beside = "; rollouts beside the rest" if self.overlaps else ""
        yield f"time of a stage, hours (an estimate{beside})"
        yield from (f"  {name:<48}{seconds / 3600:9.2f}" for name, seconds in self.seconds.items())
        total = self.stage_seconds * stages
        yield f"  {f'the run of {stages} stages, without evaluations':<48}{total / 3600:9.2f}"

    def _assumed(self) -> Iterator[str]:
        yield "assumed (each an option: megarl plan --help)"
        yield f"  {'hbm':<30}{_gib(self.device.memory):>12}  of a GPU that a process can allocate"
        for item in fields(self.assume):
            value = getattr(self.assume, item.name)
            shown = _gib(value) if item.name.endswith("_bytes") else f"{value:g}"
            yield f"  {item.name.replace('_', ' '):<30}{shown:>12}  {item.metadata['of']}"


def _rows(items: dict[str, float], limit_name: str, limit: float) -> Iterator[str]:
    yield from (_row(name, size) for name, size in items.items() if size)
    yield _row("sum", sum(items.values()))
    yield _row(limit_name, limit)


def _row(name: str, size: float) -> str:
    return f"  {name:<48}{size / GIB:9.2f}"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
