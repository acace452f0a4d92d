"""The text of a plan, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from megarl.planner.assumptions import GIB, WITHIN
from megarl.planner.plan import Plan, gib


def table(plan: Plan) -> str:
    """The whole plan as text."""
    parts = (_heading, memory, _disk, _time, _assumed)
    return "\n\n".join("\n".join(part(plan)) for part in parts)


def _heading(plan: Plan) -> Iterator[str]:
    routed = f", {plan.active_parameters / 1e9:.1f} B active" if plan.hf["num_experts"] else ""
    ranks, actor = f"{plan.nodes} x {plan.recipe.actor.processes_per_node} {plan.gpu}", plan.layout
    if plan.recipe.schedule.side_by_side:
        engines = plan.recipe.rollout.workers * plan.recipe.rollout.tensor_parallel
        ranks += f" of trainers, {plan.nodes} x {engines} of engines"
    again = plan.recipe.actor.recompute
    yield f"{plan.hf['model_type']}, {plan.parameters / 1e9:.2f} B parameters{routed}; {ranks}"
    yield (
        f"layout: tensor {actor.tensor_parallel}, pipeline {actor.pipeline_parallel}, "
        f"context {actor.context_parallel}, expert {actor.expert_parallel} x {actor.expert_tensor_parallel}, "
        f"data {actor.data_parallel} (experts {actor.expert_data_parallel}); "
        f"recompute {again if isinstance(again, str) else ', '.join(again)}"
    )
    for number, stage in enumerate(plan.stages):
        count = f"{(stage.dense + stage.expert) / 1e6:.1f} M parameters a rank"
        experts = f", {stage.expert / 1e6:.1f} M of them experts" if stage.expert else ""
        adapters = f", and {stage.adapters / 1e6:.1f} M of adapters" if stage.adapters else ""
        yield f"  pipeline stage {number}: {stage.layers} layers, {count}{experts}{adapters}"


def memory(plan: Plan) -> Iterator[str]:
    """The lines about memory of the rollout and optimize phases."""
    yield f"rollout, GiB on each GPU ({plan.replicas} replicas of {plan.recipe.rollout.tensor_parallel})"
    yield from _rows(plan.rollout)
    yield _row("share of the engine", plan.engine_share)
    longest = plan.kv_tokens / plan.longest_sequence
    yield f"  room for {plan.kv_tokens:,} tokens, {longest:.1f} responses of full length"
    yield (
        f"  {plan.running_responses:,.0f} responses decode together, on average; groups_per_chunk allows "
        f"{plan.engine_responses:,}"
    )
    yield ""
    yield f"optimize, GiB on each GPU ({plan.micro_batch_tokens:,} tokens in the largest micro-batch)"
    yield from _rows(plan.optimize)
    yield _row(f"of this GPU, {1 - plan.assume.fragmentation:.0%}", plan.usable)
    yield ""
    yield "optimize, GiB of a node's host memory"
    yield from _rows(plan.host)


def _disk(plan: Plan) -> Iterator[str]:
    yield "disk, GiB"
    for name, size in plan.disk.items():
        yield _row(name, size)


def _time(plan: Plan) -> Iterator[str]:
    stages = plan.recipe.schedule.stages
    beside = "; rollouts beside the rest" if plan.overlaps else ""
    yield f"time of a stage, hours{beside}"
    total = {f"the run of {stages} stages, without evaluations": plan.stage_seconds * stages}
    for name, seconds in (plan.seconds | total).items():
        low, high = seconds / 3600 / WITHIN, seconds / 3600 * WITHIN
        yield f"  {name:<48}{low:9.2f} .. {high:.2f}"
    yield f"  calibrated with published figures of H100 and H200, within a factor of {WITHIN} (docs/scale.md)"
    yield "  an update of two layers on one card took less: docs/gpu.md"


def _assumed(plan: Plan) -> Iterator[str]:
    yield "assumed (each an option: megarl plan --help)"
    for item in fields(plan.assume):
        value = plan.assumed[item.name]
        shown = gib(value) if item.metadata["unit"] == GIB else f"{value:g}"
        yield f"  {item.name.replace('_', ' '):<30}{shown:>12}  {item.metadata['of']}"


def _rows(items: dict[str, float]) -> Iterator[str]:
    yield from (_row(name, size) for name, size in items.items() if size)
    yield _row("sum", sum(items.values()))


def _row(name: str, size: float) -> str:
    return f"  {name:<48}{size / GIB:9.2f}"
