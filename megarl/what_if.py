"""``megarl what-if``: what every objective would do with the stored batches of a stage, at one policy or several."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.errors import UserError
from megarl.recipe.tables import Recipe
from megarl.storage.checkpoints import checkpoints
from megarl.storage.files import make_directory
from megarl.storage.run_dir import RunDir, Stage
from megarl.storage.what_if import read_records, write_request
from megarl.workers.launcher import run_phase
from megarl.workers.node_rank import NodeRank
from megarl.workers.nodes import Nodes
from megarl.workers.preflight import check

BATCHES = 8


def what_if(run_dir: Path, number: int, updates: Sequence[int], batches: int = BATCHES) -> list[dict[str, Any]]:
    """A record for each policy of stage ``number``, stored batch and objective: see `megarl.phases.what_if.Comparison`.

    updates: of the stage, after which the policies are to be compared; none: all that are there. batches: how many of
    the stage's, the last ones, which the policies before them have not trained. Changes nothing of the run.
    """
    run = RunDir.open(run_dir)
    run.check_links()
    if not 0 <= number < len(run.stages()):
        raise UserError(f"--stage {number}: this run has stages 0 to {len(run.stages()) - 1}")
    stage = run.stage(number)
    if run.recipe.schedule.kind == "live":
        raise UserError(
            f"{run.root} is a live run: several policies generate a stage, so that its batches differ in age"
        )
    run.check_prompts()
    if not stage.is_sealed():
        raise UserError(f"{stage.rollouts} is not sealed: megarl rollout {run.root} --stage {stage.number}")
    there = policies_of(stage)
    if missing := [update for update in updates if update not in there]:
        known = ", ".join(map(str, there))
        raise UserError(
            f"--update {missing[0]}: of stage {stage.number} there are the policies after updates {known}; [actor] "
            "checkpoint_every and keep_checkpoints say which are kept"
        )
    total = run.recipe.schedule.updates_per_pass
    if not 2 <= batches <= total:
        raise UserError(f"--batches {batches}: intervals need 2 at least, and the stage has {total}")
    with tempfile.TemporaryDirectory(prefix="megarl-what-if-") as folder, Nodes(NodeRank()) as nodes:
        scratch = _scratch(stage, Path(folder) / "run")
        check(nodes.starter, scratch.run.recipe)
        write_request(scratch.run.root, list(updates) or there, range(total - batches, total))
        run_phase(nodes, scratch, "what_if", 1)
        return read_records(scratch.run.root)


def policies_of(stage: Stage) -> list[int]:
    """After how many updates of the stage there is a policy: its beginning, its checkpoints and its end."""
    end = [stage.run.recipe.schedule.updates_per_stage] if stage.next.policy.exists() else []
    return sorted({0, *(done for done, _ in checkpoints(stage.checkpoints)), *end})


def _scratch(stage: Stage, root: Path) -> Stage:
    """The same stage in a run directory of its own, by links, on one process with the built-in engine."""
    scratch = RunDir.create(root, _on_one_process(stage.run.recipe)).stage(stage.number)
    for path in (stage.run.stage(0).policy, stage.policy, stage.rollouts, stage.checkpoints, stage.next.policy):
        link = scratch.run.root / path.relative_to(stage.run.root)
        make_directory(link.parent)
        if path.exists() and not link.exists():
            link.symlink_to(path.resolve())
    return scratch


def _on_one_process(recipe: Recipe) -> Recipe:
    """With the objectives' definitions in torch, which exist for each of them."""
    parallel = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel", "processes_per_node")
    one: dict[str, Any] = dict.fromkeys(parallel, 1)
    actor = recipe.actor.model_copy(
        update=one | {"expert_tensor_parallel": None, "statistics_scope": "exact", "kernels": "torch"}
    )
    rollout = recipe.rollout.model_copy(update={"engine": "builtin", "workers": 1, "tensor_parallel": 1})
    megatron = {k: v for k, v in recipe.megatron.items() if k != "virtual_pipeline_model_parallel_size"}
    return recipe.model_copy(update={"actor": actor, "rollout": rollout, "stages": {}, "megatron": megatron})
