"""A phase on a stage of a run that stays as it is: in a scratch run directory, by links, on one process."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.recipe.tables import Recipe
from megarl.storage.checkpoints import checkpoints
from megarl.storage.files import make_directory
from megarl.storage.requests import read_answer, write_request
from megarl.storage.run_dir import RunDir, Stage
from megarl.views.progress import Progress
from megarl.workers.launcher import run_phase
from megarl.workers.node_rank import NodeRank
from megarl.workers.nodes import Nodes
from megarl.workers.preflight import check


def open_stage(run_dir: Path, number: int) -> Stage:
    """`UserError` where there is no such stage, or it is a live one."""
    run = RunDir.open(run_dir)
    run.check_links()
    if run.recipe.schedule.kind == "live":
        raise UserError(f"{run.root} is a live run: several policies generate a stage, so its batches differ in age")
    if not 0 <= number < len(run.stages()):
        raise UserError(f"--stage {number}: this run has stages 0 to {len(run.stages()) - 1}")
    return run.stage(number)


def policies_of(stage: Stage) -> list[int]:
    """After how many updates of the stage there is a policy: its beginning, its checkpoints and its end."""
    begin = [0] if stage.policy.exists() else []
    end = [stage.run.recipe.schedule.updates_per_stage] if stage.next.policy.exists() else []
    return sorted({*begin, *(done for done, _ in checkpoints(stage.checkpoints)), *end})


def check_updates(stage: Stage, updates: list[int]) -> None:
    """`UserError` unless there is a policy after each of so many ``updates`` of the stage."""
    there = policies_of(stage)
    if missing := [update for update in updates if update not in there]:
        raise UserError(
            f"--update {missing[0]}: of stage {stage.number} there are the policies after updates "
            f"{', '.join(map(str, there)) or 'none'}; [actor] checkpoint_every, keep_checkpoints and keep_policies say "
            "which are kept"
        )


def ask(stage: Stage, phase: str, **request: Any) -> list[dict[str, Any]]:
    """Run a phase on the stage, with what it is asked for, and return its answer."""
    with tempfile.TemporaryDirectory(prefix="megarl-scratch-") as folder, Nodes(NodeRank()) as nodes:
        scratch = _linked(stage, Path(folder) / "run")
        check(nodes.starter, scratch.run.recipe)
        write_request(scratch.run.root, **request)
        with Progress(scratch.run.root, scratch.run.recipe, sys.stderr):
            run_phase(nodes, scratch, phase, 1)
        return read_answer(scratch.run.root)


def _linked(stage: Stage, root: Path) -> Stage:
    scratch = RunDir.create(root, _on_one_process(stage.run.recipe)).stage(stage.number)
    for path in (stage.run.base, stage.policy, stage.rollouts, stage.checkpoints, stage.next.policy):
        link = scratch.run.root / path.relative_to(stage.run.root)
        make_directory(link.parent)
        if path.exists() and not link.exists():
            link.symlink_to(path.resolve())
    return scratch


def _on_one_process(recipe: Recipe) -> Recipe:
    """With the built-in engine, and with the objectives' definitions in torch, which exist for each of them."""
    parallel = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "processes_per_node")
    one: dict[str, Any] = dict.fromkeys(parallel, 1)
    actor = recipe.actor.model_copy(
        update=one | {"expert_tensor_parallel": None, "statistics_scope": "exact", "kernels": "torch"}
    )
    rollout = recipe.rollout.model_copy(update={"engine": "builtin", "workers": 1, "tensor_parallel": 1})
    megatron = {k: v for k, v in recipe.megatron.items() if k != "virtual_pipeline_model_parallel_size"}
    return recipe.model_copy(update={"actor": actor, "rollout": rollout, "stages": {}, "megatron": megatron})
