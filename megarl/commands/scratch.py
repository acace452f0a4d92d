"""Runs a phase on a stage of a run without changing the run: on one process, in a temporary run directory of links."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.planner.preflight import check
from megarl.recipe.tables import Recipe
from megarl.storage.checkpoints import checkpoints
from megarl.storage.files import make_directory
from megarl.storage.run_dir import RunDir, Stage
from megarl.views.progress import Progress
from megarl.workers.launcher import run_phase
from megarl.workers.node_rank import NodeRank
from megarl.workers.nodes import Nodes


def open_stage(run_dir: Path, number: int) -> Stage:
    """Stage ``number`` of a run, as on a command line; `UserError` if there is no such stage."""
    run = RunDir.open(run_dir)
    run.check_links()
    return stage_of(run, number)


def stage_of(run: RunDir, number: int) -> Stage:
    """Stage ``number`` of ``run``; `UserError` if there is none."""
    if not 0 <= number < run.recipe.schedule.stages:
        raise UserError(f"--stage {number}: this run has stages 0 to {run.recipe.schedule.stages - 1}")
    return run.stage(number)


def open_staged(run_dir: Path, number: int) -> Stage:
    """As `open_stage`; `UserError` also if the run is a live one."""
    stage = open_stage(run_dir, number)
    require_staged(stage.run)
    return stage


def require_staged(run: RunDir) -> None:
    """`UserError` for a live run, whose stages several policies generate while they are trained."""
    if not run.recipe.schedule.one_policy:
        raise UserError(
            f"{run.root} is a live run: `megarl train` makes its rollouts and updates at the same time, so no stage of "
            "it has a phase or a policy of its own"
        )


def policies_of(stage: Stage) -> list[int]:
    """The updates of the stage after which there is a policy: 0 (its start), its checkpoints and its end."""
    start = [0] if stage.policy.exists() else []
    end = [stage.run.recipe.schedule.updates_per_stage] if stage.next.policy.exists() else []
    return sorted({*start, *(update for update, _ in checkpoints(stage.checkpoints)), *end})


def updates_within(stage: Stage, updates: Sequence[int]) -> list[int]:
    """For policies that are named by updates of the run: how many updates of the stage each has had; `UserError` unless
    the stage has them all."""
    first = stage.first_update
    available = [first + update for update in policies_of(stage)]
    if missing := [update for update in updates if update not in available]:
        raise UserError(
            f"--update {missing[0]}: stage {stage.number} has policies after these updates of the run only: "
            f"{', '.join(map(str, available)) or 'none'}; [actor] checkpoint_every, keep_checkpoints and keep_policies "
            "determine which are kept"
        )
    return [update - first for update in updates]


def run_scratch_phase(stage: Stage, phase: str, **request: Any) -> list[dict[str, Any]]:
    """Run ``phase`` on the stage in a scratch run directory, pass it ``request``, and return the records it answers."""
    with tempfile.TemporaryDirectory(prefix="megarl-scratch-") as folder, Nodes(NodeRank()) as nodes:
        scratch = _linked(stage, Path(folder) / "run")
        check(nodes.starter, scratch.run.recipe, optimizes=False)
        scratch.run.send("request", **request)
        with Progress(scratch.run.root, scratch.run.recipe, sys.stderr):
            run_phase(nodes, scratch, phase, 1)
        return list(scratch.run.receive("answer")["records"])


def _linked(stage: Stage, root: Path) -> Stage:
    """The stage in a new run directory ``root``, with links to the files of the original."""
    scratch = RunDir.create(root, _on_one_process(stage.run.recipe)).stage(stage.number)
    for path in (stage.run.base, stage.policy, stage.rollouts, stage.checkpoints, stage.next.policy):
        link = scratch.run.root / path.relative_to(stage.run.root)
        make_directory(link.parent)
        if path.exists() and not link.exists():
            link.symlink_to(path.resolve())
    return scratch


def _on_one_process(recipe: Recipe) -> Recipe:
    """The recipe for one process, with the built-in engine and the torch kernels, which exist for every objective."""
    parallel = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "processes_per_node")
    one: dict[str, Any] = dict.fromkeys(parallel, 1)
    actor = recipe.actor.model_copy(
        update=one | {"expert_tensor_parallel": None, "statistics_scope": "exact", "kernels": "torch"}
    )
    rollout = recipe.rollout.model_copy(update={"engine": "builtin", "workers": 1, "tensor_parallel": 1})
    megatron = {k: v for k, v in recipe.megatron.items() if k != "virtual_pipeline_model_parallel_size"}
    return recipe.model_copy(update={"actor": actor, "rollout": rollout, "stages": {}, "megatron": megatron})
