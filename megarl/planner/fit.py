"""``megarl plan``: whether a recipe fits the given GPUs, and if not, which layouts would fit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megarl.errors import UserError
from megarl.models.hf_config import read_hf_config
from megarl.models.lora import check_lora
from megarl.models.settings import check_layers
from megarl.planner.assumptions import WITHIN, Assumptions
from megarl.planner.parameter_counts import ParameterCounter, StageParameters
from megarl.planner.plan import Plan
from megarl.planner.sizes import GPUS
from megarl.planner.table import table
from megarl.recipe.layout import check_layout
from megarl.recipe.load import load_recipe, override_recipe
from megarl.recipe.optimizer import check_optimizer
from megarl.recipe.tables import Recipe


@dataclass(frozen=True)
class Fit:
    """A plan, and if the trainers do not fit, a layout with which they do, as ``--set`` changes of the recipe."""

    title: str
    plan: Plan
    alternative: list[str] | None

    @property
    def misfit(self) -> str | None:
        return self.plan.misfit()

    def text(self) -> str:
        """The plan, its misfit and the alternative, as text for a terminal."""
        lines = [f"{self.title}\n\n{table(self.plan)}"]
        if self.misfit is not None:
            lines.append(f"\ndoes not fit: {self.misfit}")
        if self.alternative is not None:
            lines.append(f"  this fits: {' '.join(f'--set {change}' for change in self.alternative)}")
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
            "assumed": plan.assumed,
            "misfit": self.misfit,
            "alternative": self.alternative,
        }
        return json.dumps(record)


def make_plan(
    recipe_path: Path,
    nodes: int,
    gpu: str,
    overrides: Sequence[str] = (),
    assume: Assumptions | None = None,
    change: Callable[[Recipe], Recipe] = lambda recipe: recipe,
) -> Fit:
    """Size a recipe on ``nodes`` nodes of GPUs of kind ``gpu``; `UserError` if it cannot be planned at all.

    change: applied to the recipe first.
    """
    recipe, gpu = change(load_recipe(recipe_path, overrides)), gpu.lower()
    if gpu not in GPUS:
        raise UserError(f"--gpu {gpu}: known are {', '.join(GPUS)}")
    if nodes < 1:
        raise UserError(f"--nodes {nodes}: at least 1")
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
    check_optimizer(recipe)
    with ParameterCounter() as counter:
        plan = Plan.of(recipe, hf, nodes, gpu, counter, assume)
        trainers_alone = plan.rollout_misfit() is None and plan.optimize_misfit() is not None
        alternative = next(layouts_that_fit(plan, counter), None) if trainers_alone else None
    return Fit(f"{recipe_path}, model of {config / 'config.json'}", plan, alternative)


def layouts_that_fit(plan: Plan, counter: ParameterCounter) -> Iterator[list[str]]:
    """Layouts of the trainers with which the recipe fits these GPUs, as changes of the recipe; the least divided first.

    All layouts come first with the recipe's other settings, then with whole layers recomputed.
    """
    ranks, whole, names = plan.layout.ranks, plan.whole, ("tensor", "pipeline", "expert", "expert_tensor")
    # sizes of the first and last stage that the recipe sets fit only its own number of stages
    unequal = plan.layout.first_layers or plan.layout.last_layers
    pipelines, layouts = [plan.layout.pipeline_parallel] if unequal else _divisors(ranks), []
    for tensor, pipeline, expert in itertools.product(
        _divisors(plan.recipe.actor.processes_per_node), pipelines, _divisors(ranks)
    ):
        for expert_tensor in {1, tensor} if plan.hf["num_experts"] else {tensor}:
            sizes = zip(names, (tensor, pipeline, expert, expert_tensor), strict=True)
            layout = replace(plan.layout, **{f"{name}_parallel": size for name, size in sizes})
            if not any(layout.problems(plan.hf)):
                layouts.append(layout)
    layouts.sort(key=lambda x: (x.tensor_parallel * x.pipeline_parallel, x.pipeline_parallel, x.expert_tensor_parallel))
    for recompute, layout in itertools.product(([], ["actor.recompute=full"]), layouts):
        changes = [*(f"actor.{name}_parallel={getattr(layout, f'{name}_parallel')}" for name in names), *recompute]
        recipe = override_recipe(plan.recipe, changes)
        # a rank holds at least an even share of the parameters; if that does not fit, nothing is counted
        pipeline, split = layout.pipeline_parallel, layout.expert_parallel * layout.expert_tensor_parallel
        dense, expert = layout.tensor_parallel * pipeline, split * pipeline
        least = StageParameters(
            whole.layers // pipeline,
            whole.dense // dense,
            whole.expert // expert,
            dense_adapters=whole.dense_adapters // dense,
            expert_adapters=whole.expert_adapters // expert,
        )
        if replace(plan, recipe=recipe, layout=layout, stages=[least] * pipeline).optimize_misfit():
            continue
        if Plan.of(recipe, plan.hf, plan.nodes, plan.gpu, counter, plan.assume).misfit() is None:
            yield changes


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
