"""The whole run: a few large stages, each of which generates, then optimises on what it generated."""

from __future__ import annotations

import shutil

from megarl.errors import PhaseFailed, UserError
from megarl.storage.best import settle_evaluations
from megarl.storage.policies import copy_policy
from megarl.storage.retention import require_policy
from megarl.storage.run_checks import check_run
from megarl.storage.run_dir import RunDir
from megarl.views.progress import Progress
from megarl.views.report import write_report
from megarl.workers.launcher import run_phase
from megarl.workers.nodes import Nodes


def train(nodes: Nodes, run: RunDir, until: tuple[str, int] | None = None) -> None:
    """mu-GRPO: freeze the policy, answer a whole stage of prompts, then make all of the stage's updates on the answers.

    Whatever is on disk already is not done again, so a killed run continues where it was. ``until`` names the phase
    and stage after which to stop.
    """
    recipe = run.recipe
    nodes.starter.prepare(run.root)
    trainers = recipe.actor.processes_per_node

    check_run(run)
    if not run.base.exists():
        copy_policy(recipe.model.path, recipe.model.tokenizer_path, run.base)
    with Progress(run.root, recipe):
        if rehearsal_is_due(run, until):
            rehearse(nodes, run)
        log_finished_stages(run)
        for stage in run.stages():
            replicas = stage.rollout.workers
            if stage.due_evaluations() and (recipe.schedule.kind == "live" or stage.is_sealed()):
                run_phase(nodes, stage, "evaluate", replicas)  # else by the engines of the rollout phase
            if recipe.schedule.kind == "live":
                settle_evaluations(stage)
                if not (stage.is_sealed() and stage.is_trained()):
                    require_policy(stage)
                    run_phase(nodes, stage, "live", trainers + replicas)  # both at the same time
            else:
                if not stage.is_sealed():
                    require_policy(stage)
                    run_phase(nodes, stage, "rollout", replicas)  # pi_stage answers; engines get all memory
                settle_evaluations(stage)
                if until == ("rollout", stage.number):
                    return
                if not stage.is_trained():
                    require_policy(stage)
                    run_phase(nodes, stage, "optimize", trainers)  # S updates: pi_stage -> pi_stage+1
            if until is not None and until[1] == stage.number:
                return
        if run.end.due_evaluations():
            run_phase(nodes, run.end, "evaluate", run.end.rollout.workers)
        settle_evaluations(run.end)
    write_report([run.root], run.root / "report.html")


def rehearse(nodes: Nodes, run: RunDir) -> None:
    """One update on synthetic responses, its export and a checkpoint on the recipe's layout, in a scratch directory.

    `UserError` or `PhaseFailed` where any of that fails.
    """
    shutil.rmtree(run.rehearsal, ignore_errors=True)  # of a killed one
    try:
        run_phase(nodes, run.stage(0), "rehearse", run.recipe.actor.processes_per_node)
    except (PhaseFailed, UserError) as error:
        raise type(error)(
            "the rehearsal failed (one update on synthetic responses, its export and a checkpoint), so nothing was "
            f"generated: {error}"
        ) from error
    finally:
        shutil.rmtree(run.rehearsal, ignore_errors=True)


def rehearsal_is_due(run: RunDir, until: tuple[str, int] | None) -> bool:
    """On GPUs before the first rollouts, where an optimize phase is to follow."""
    wanted = run.recipe.run.rehearse and run.recipe.actor.backend == "cuda"
    return wanted and not run.stage(0).rollouts.exists() and optimizes(run, until)


def log_finished_stages(run: RunDir) -> None:
    total = len(run.stages())
    if finished := sum(stage.is_trained() for stage in run.stages()):
        run.log_event("resume", phase="train", stage=finished, skipped=finished, total=total, unit="stages")


def optimizes(run: RunDir, until: tuple[str, int] | None) -> bool:
    """Whether `train` has an optimize phase ahead of it."""
    live = run.recipe.schedule.kind == "live"
    stages = run.stages() if until is None else run.stages()[: until[1] + (live or until[0] == "optimize")]
    return any(not stage.is_trained() for stage in stages)
