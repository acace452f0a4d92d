"""``megarl plan``: whether a recipe fits the given GPUs, and if not, which layouts would fit."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megarl.errors import UserError
from megarl.foreign import quoted
from megarl.models.hf_config import read_hf_config
from megarl.models.lora import check_lora, recomputable
from megarl.models.settings import check_layers
from megarl.planner.assumptions import GIB, WITHIN, Assumptions
from megarl.planner.parameter_counts import ParameterCounter, StageParameters
from megarl.planner.plan import Plan
from megarl.planner.sizes import GPUS
from megarl.planner.table import table
from megarl.recipe.layout import Layout, check_layout
from megarl.recipe.load import load_recipe, override_recipe
from megarl.recipe.megatron import scaling_of
from megarl.recipe.optimizer import check_optimizer
from megarl.recipe.tables import Recipe


@dataclass(frozen=True)
class Fit:
    """A plan, and if it does not fit, up to two layouts that do, each as ``--set`` changes of the recipe."""

    title: str
    plan: Plan
    layouts: list[list[str]]

    @property
    def misfit(self) -> str | None:
        return self.plan.misfit()

    def text(self) -> str:
        """The plan, its misfit and the alternatives, as text for a terminal."""
        lines = [f"{self.title}\n\n{table(self.plan)}"]
        if self.misfit is not None:
            lines.append(f"\ndoes not fit: {self.misfit}")
            commands = (" ".join(f"--set {quoted(change)}" for change in changes) for changes in self.layouts)
            lines += [f"  this fits: {command}" for command in commands]
            if not self.layouts:
                lines.append("  no layout on these GPUs fits: add nodes or shorten responses")
        return "\n".join(lines)

    def as_json(self) -> str:
        """The plan for programs: bytes on a GPU or disk, seconds of a stage."""
        plan = self.plan
        rollout = {"replicas": plan.replicas, "bytes": plan.rollout, "engine_bytes": plan.engine_share}
        record = {
            "model_type": plan.hf["model_type"],
            "parameters": plan.parameters,
            "active_parameters": plan.active_parameters,
            "gpu": plan.gpu,
            "nodes": plan.nodes,
            "layout": asdict(plan.layout),
            "pipeline_stages": list(map(asdict, plan.stages)),
            "rollout": rollout | {"kv_tokens": plan.kv_tokens},
            "optimize": {"bytes": plan.optimize, "usable_bytes": plan.usable, "host_bytes": plan.host},
            "disk_bytes": plan.disk,
            "stage_seconds": plan.seconds,
            "run_seconds": plan.stage_seconds * plan.recipe.schedule.stages,
            "seconds_within": WITHIN,
            "assumed": asdict(plan.assume) | {"hbm_bytes": plan.device.memory},
            "misfit": self.misfit,
            "margin": plan.margin,
            "alternatives": self.layouts,
        }
        return json.dumps(record)


def make_plan(
    recipe_path: Path,
    nodes: int,
    gpu: str,
    overrides: Sequence[str] = (),
    assume: Assumptions | None = None,
    hbm: float | None = None,
    change: Callable[[Recipe], Recipe] = lambda recipe: recipe,
) -> Fit:
    """Size a recipe on ``nodes`` nodes of GPUs of kind ``gpu``; `UserError` if it cannot be planned at all.

    hbm: GiB of a GPU that a process can allocate; default: those of ``gpu``. change: applied to the recipe first.
    """
    recipe, gpu = change(load_recipe(recipe_path, overrides)), gpu.lower()
    if gpu not in GPUS:
        raise UserError(f"--gpu {gpu}: known are {', '.join(GPUS)}")
    if nodes < 1:
        raise UserError(f"--nodes {nodes}: at least 1")
    if hbm is not None and not 0 < hbm < float("inf"):
        raise UserError(f"--hbm {hbm:g}: GiB of a GPU that a process can allocate, above 0")
    if recipe.actor.backend != "cuda":
        raise UserError('[actor] backend = "cpu": megarl plan sizes runs on GPUs; add --set actor.backend=cuda')
    config = recipe.model.path if (recipe.model.path / "config.json").exists() else Path(recipe_path).parent
    if not (config / "config.json").exists():
        raise UserError(
            f"there is no {recipe.model.path / 'config.json'}: get the model, or put its config.json beside the recipe"
        )
    hf = read_hf_config(config)
    check_layout(recipe, hf, nodes)
    check_layers(recipe, hf)
    check_lora(recipe, hf)
    check_optimizer(recipe, here=False)
    _check_gpu(recipe, gpu)
    with ParameterCounter() as counter:
        plan = Plan.of(recipe, hf, nodes, gpu, counter, assume, hbm and hbm * GIB)
        layouts = [] if plan.misfit() is None else list(itertools.islice(alternatives(plan, counter), 2))
    return Fit(f"{recipe_path}, model of {config / 'config.json'}", plan, layouts)


def _check_gpu(recipe: Recipe, gpu: str) -> None:
    scaling, kind = scaling_of(recipe.megatron), GPUS[gpu]
    if scaling is not None and not kind.fp8:
        raise UserError(f"[megatron] fp8 = {recipe.megatron['fp8']!r}: --gpu {gpu} cannot multiply in 8 bits")
    if scaling == "mxfp8" and kind.fp8_transposes:
        raise UserError(f"[megatron] fp8_recipe = 'mxfp8' needs a GPU from Blackwell on, not --gpu {gpu}")


def alternatives(plan: Plan, counter: ParameterCounter) -> Iterator[list[str]]:
    """Settings with which the recipe fits these GPUs, the least divided layouts first."""
    rollout = _rollout_that_fits(plan) if plan.rollout_misfit() else []
    if rollout is None:
        return
    if plan.optimize_misfit() is None:
        yield from [rollout] if rollout else []
        return
    for changes, layout in _layouts(plan):
        recipe = override_recipe(plan.recipe, rollout + changes)
        # a rank holds at least an even share of the parameters; if that does not fit, nothing is counted
        pipeline, split = layout.pipeline_parallel, layout.expert_parallel * layout.expert_tensor_parallel
        dense, expert = plan.whole.dense // layout.tensor_parallel, plan.whole.expert // split
        least = StageParameters(
            plan.whole.layers // pipeline,
            dense // pipeline,
            expert // pipeline,
            dense_adapters=plan.whole.dense_adapters // (layout.tensor_parallel * pipeline),
            expert_adapters=plan.whole.expert_adapters // (split * pipeline),
        )
        if replace(plan, recipe=recipe, layout=layout, stages=[least] * pipeline).optimize_misfit():
            continue
        counted = Plan.of(recipe, plan.hf, plan.nodes, plan.gpu, counter, plan.assume, plan.hbm)
        if counted.misfit() is None:
            yield rollout + changes


def _rollout_that_fits(plan: Plan) -> list[str] | None:
    recipe, engine = plan.recipe, plan.recipe.rollout
    workers, trainers = engine.workers * engine.tensor_parallel, recipe.actor.processes_per_node
    available = workers if recipe.schedule.side_by_side else trainers
    for tensor in _divisors(available):
        changes = [f"rollout.tensor_parallel={tensor}", f"rollout.workers={available // tensor}"]
        if replace(plan, recipe=override_recipe(recipe, changes)).rollout_misfit() is None:
            return changes
    return None


def _layouts(plan: Plan) -> Iterator[tuple[list[str], Layout]]:
    """Each valid layout, as changes of the recipe and as `Layout`; the least divided layouts first.

    All layouts come first with the recipe's other settings. Then they are repeated with settings that take less memory:
    parts of layers recomputed, whole layers recomputed, also smaller micro-batches, also the optimizer on the host, and
    also gradients in bfloat16.
    """
    ranks, actor, names = plan.layout.ranks, plan.recipe.actor, ("tensor", "pipeline", "expert", "expert_tensor")
    layers, asked = plan.hf["num_hidden_layers"], plan.layout.first_layers + plan.layout.last_layers > 0
    layouts = []
    for tensor, pipeline, expert in itertools.product(_divisors(actor.processes_per_node), *[_divisors(ranks)] * 2):
        for expert_tensor in {1, tensor} if plan.hf["num_experts"] else {tensor}:
            layout = Layout(ranks, tensor, pipeline, actor.context_parallel, expert, expert_tensor).balanced(layers)
            if asked:  # the recipe sets the sizes of the stages, which fit only its own layout
                stages = layout.stage_layers(layers)
                layout = replace(layout, first_layers=stages[0], last_layers=stages[-1])
            if not any(layout.problems(plan.hf)):
                layouts.append(layout)
    layouts.sort(key=lambda x: (x.tensor_parallel * x.pipeline_parallel, x.pipeline_parallel, x.expert_tensor_parallel))
    budget, least = actor.tokens_per_micro_batch, plan.longest_sequence
    full = [] if actor.recompute == "full" else ["actor.recompute=full"]
    steps = [
        [],
        *(_parts(plan) if actor.recompute == "none" else ()),
        *([full] if full else []),
        *([[*full, f"actor.tokens_per_micro_batch={least}"]] if least < budget else []),
    ]
    for setting, changes in _LESS_MEMORY.items():
        section, _, key = setting.partition(".")
        if plan.recipe.actor.lora is None and key not in getattr(plan.recipe, section):
            steps.append([*steps[-1], *changes])
    for settings in steps:
        for layout in layouts:
            changes = [f"actor.{name}_parallel={getattr(layout, f'{name}_parallel')}" for name in names]
            if layout.first_layers:
                ends = {"first": layout.first_layers, "last": layout.last_layers}
                changes += [f"megatron.num_layers_in_{end}_pipeline_stage={size}" for end, size in ends.items()]
            yield [*changes, *settings], layout


def _parts(plan: Plan) -> Iterator[list[str]]:
    """Changes that recompute parts of layers, the cheapest first."""
    known = recomputable(plan.hf)
    shared = [["layernorm", "shared_experts"]] if "shared_experts" in known else []
    for names in (["layernorm"], *shared, ["layernorm", *sorted(known - {"shared_experts"})]):
        changes = [f"actor.recompute={json.dumps(names)}"]
        with contextlib.suppress(UserError):
            check_layers(override_recipe(plan.recipe, changes), plan.hf)
            yield changes


# settings of Megatron that take less memory; a setting that the recipe has itself is left alone
_LESS_MEMORY = {
    "megatron_optimizer.use_precision_aware_optimizer": [
        "megatron_optimizer.use_precision_aware_optimizer=true",
        "megatron_optimizer.optimizer_cpu_offload=true",
        "megatron_optimizer.optimizer_offload_fraction=1.0",
    ],
    "megatron_ddp.grad_reduce_in_fp32": ["megatron_ddp.grad_reduce_in_fp32=false"],
}


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
