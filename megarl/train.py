"""The whole run: a few large stages, each of which generates, then optimises on what it generated."""

from __future__ import annotations

from megarl.storage.policies import copy_policy
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
    recipe, stages = run.recipe, run.recipe.schedule.stages
    actor_processes = recipe.actor.processes_per_node

    if not run.policy(0).exists():
        copy_policy(recipe.model.path, recipe.model.tokenizer_path, run.policy(0))
    with Progress(run.root, recipe):
        if finished := sum(run.policy(stage + 1).exists() for stage in range(stages)):
            run.log_event("resume", phase="train", stage=finished, skipped=finished, total=stages, unit="stages")
        for stage in range(stages):
            replicas = recipe.rollout_of(stage).workers
            if evaluation_is_due(run, stage):
                run_phase(nodes, run, "evaluate", stage, replicas)
            if recipe.schedule.kind == "live":
                if not (run.is_sealed(stage) and run.policy(stage + 1).exists()):
                    run_phase(nodes, run, "live", stage, actor_processes + replicas)  # both at the same time
                if until is not None and until[1] == stage:
                    return
                continue
            if not run.is_sealed(stage):
                run_phase(nodes, run, "rollout", stage, replicas)  # pi_stage answers; engines get all memory
            if until == ("rollout", stage):
                return
            if not run.policy(stage + 1).exists():
                run_phase(nodes, run, "optimize", stage, actor_processes)  # S updates: pi_stage -> pi_stage+1
            if until == ("optimize", stage):
                return
        if evaluation_is_due(run, stages):
            run_phase(nodes, run, "evaluate", stages, recipe.rollout_of(stages).workers)
    write_report([run.root], run.root / "report.html")


def optimizes(run: RunDir, until: tuple[str, int] | None) -> bool:
    """Whether `train` has an optimize phase ahead of it."""
    live = run.recipe.schedule.kind == "live"
    stages = run.recipe.schedule.stages if until is None else until[1] + (live or until[0] == "optimize")
    return any(not run.policy(stage + 1).exists() for stage in range(stages))


def evaluation_is_due(run: RunDir, stage: int) -> bool:
    """Every ``eval.every`` stages and at the end, once."""
    every = run.recipe.eval.every
    due = every > 0 and (stage % every == 0 or stage == run.recipe.schedule.stages)
    return due and run.evaluation(stage) is None
