"""Plans the Slurm jobs of a run and checks that the recipe's layout fills their nodes. Does not import nemo-run."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.recipe.load import load_without_objective
from megarl.recipe.sweep import load_sweep
from megarl.recipe.tables import Recipe


@dataclass(frozen=True)
class ChainJob:
    """One job in the chain of jobs that make a run."""

    name: str
    until: str | None  # the phase after which it stops, as `megarl train --until` has it; None: the end of the run
    optimizes: bool  # whether it runs optimize phases
    nodes: int
    partition: str | None


def plan_chain(recipe: Recipe, options: argparse.Namespace) -> list[ChainJob]:
    """The jobs of a run, in order: a single one, or with ``--chain`` one per phase and one for the end of the run."""
    name = "".join(c if c.isalnum() else "-" for c in options.recipe.stem)
    if options.chain and recipe.schedule.kind == "live":
        raise UserError("--chain makes a job of each phase, but a live run has only one phase per stage: do not use it")
    if not options.chain:
        return [ChainJob(name, None, True, options.nodes, options.partition)]
    optimize = options.optimize_nodes or options.nodes, options.optimize_partition or options.partition
    links = []
    for stage in range(recipe.schedule.stages):
        links.append(ChainJob(f"{name}-rollout-{stage}", f"rollout:{stage}", False, options.nodes, options.partition))
        links.append(ChainJob(f"{name}-optimize-{stage}", f"optimize:{stage}", True, *optimize))
    return [*links, ChainJob(f"{name}-end", None, False, options.nodes, options.partition)]  # last evaluation, report


def recipes_of_sweep(path: Path) -> list[Recipe]:
    """The recipe of each point of a sweep file, without checks that need torch; `UserError` for mistakes in them."""
    table = load_sweep(path)
    settings = [[f"{name}={toml_value(value)}" for name, value in point.settings] for point in table.points()]
    return [load_without_objective(table.recipe, changes) for changes in settings]


def toml_value(value: Any) -> str:
    """``value`` as TOML on one line; entries of tables that are None are left out."""
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {toml_value(part)}" for key, part in value.items() if part is not None)
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def missing_here(recipe: Recipe) -> list[str]:
    """The files that a job would read but this machine does not have, as "SETTING: PATH"."""
    suites = {f"[eval] suite {suite.name}": suite.data for suite in recipe.suites if suite.own}
    files = {"[model] path": [recipe.model.path], "[model] tokenizer": [recipe.model.tokenizer_path]}
    for setting, table in {"[data] train": recipe.data, **suites}.items():
        files[setting] = [Path(file) for file in table.files]
    files["[data] template"] = [Path(file) for file in recipe.template_files()]
    for file, table in recipe.own_files().items():
        files.setdefault(f"[{table}] path", []).append(Path(file))
    return [
        f"{setting}: {path}" for setting, paths in files.items() for path in dict.fromkeys(paths) if not path.exists()
    ]


def check_layout(recipe: Recipe, link: ChainJob, gpus: int | None) -> None:
    """`UserError` for a layout that leaves GPUs of a node idle, needs more than it has, or does not divide."""
    actor = recipe.actor
    if link.nodes < 1:
        raise UserError(f"--nodes {link.nodes}: give at least 1")
    if actor.backend == "cpu":
        if gpus:
            raise UserError(f'--gpus-per-node {gpus}, but the recipe has [actor] backend = "cpu"')
    else:
        gpus = recipe.devices_per_node if gpus is None else gpus
        live = recipe.schedule.kind == "live" and not recipe.schedule.colocate  # trainers beside engines
        trainers = actor.processes_per_node if live else 0
        used = {} if live else {"[actor] processes_per_node": actor.processes_per_node}
        for stage, rollout in recipe.distinct_rollouts.items():
            table = f"[stages.{stage}]" if str(stage) in recipe.stages else "[rollout]"
            setting = f"{table} workers * tensor_parallel" + " + [actor] processes_per_node" * live
            used[setting] = rollout.workers * rollout.tensor_parallel + trainers
        for setting, value in used.items():
            if value != gpus:
                raise UserError(f"{setting} = {value} does not fill the {gpus} GPUs of a node")
    world = link.nodes * actor.processes_per_node
    parts = {
        "tensor_parallel * pipeline_parallel * context_parallel": actor.tensor_parallel
        * actor.pipeline_parallel
        * actor.context_parallel,
        "expert_parallel * expert_tensor_parallel * pipeline_parallel": actor.expert_parallel
        * (actor.expert_tensor_parallel or actor.tensor_parallel)
        * actor.pipeline_parallel,
    }
    for name, ranks in parts.items():
        if link.optimizes and world % ranks:
            raise UserError(
                f"[actor] {name} = {ranks} does not fill {link.nodes} nodes * {actor.processes_per_node} processes "
                f"= {world} ranks: the number of ranks must be a multiple of {ranks}"
            )
