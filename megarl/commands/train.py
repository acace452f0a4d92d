"""A whole training run: a few large stages, each of which generates rollouts and then optimises the policy on them."""

from __future__ import annotations

import shutil

from megarl.errors import PhaseFailed, UserError
from megarl.foreign import quoted
from megarl.storage.policies import copy_policy
from megarl.storage.run_dir import RunDir
from megarl.storage.run_dir.checks import check_run
from megarl.storage.run_dir.retention import require_policy, update_best_and_remove_policies
from megarl.views.comparison import difference
from megarl.views.progress import Progress
from megarl.views.report import write_report
from megarl.workers.launcher import run_phase
from megarl.workers.nodes import Nodes


def train(nodes: Nodes, run: RunDir, until: tuple[str, int] | None = None) -> None:
    """The loop of mu-GRPO: in each stage the frozen policy answers all prompts, then is updated on these answers.

    Phases whose results are on disk are skipped, so a killed run continues where it stopped. ``until``, such as
    ("rollout", 0), names the phase and stage after which to return.
    """
    recipe = run.recipe
    trainers = recipe.actor.processes_per_node

    check_run(run)
    if not run.base.exists():
        copy_policy(recipe.model.path, recipe.model.tokenizer_path, run.base)
    with Progress(run.root, recipe):
        rehearses = recipe.run.rehearse and recipe.actor.backend == "cuda"
        if rehearses and not run.stage(0).rollouts.exists() and optimizes(run, until):
            rehearse(nodes, run)  # before the first rollouts, if this start will reach an optimize phase
        stages = run.stages()
        if finished := sum(stage.is_trained() for stage in stages):
            run.log_event("resume", phase="train", stage=finished, skipped=finished, total=len(stages), unit="stages")
        for stage in stages:
            replicas = stage.rollout.workers
            if stage.due_evaluations() and (not recipe.schedule.one_policy or stage.is_sealed()):
                run_phase(nodes, stage, "evaluate", replicas)  # otherwise the rollout phase's engines evaluate
            if not recipe.schedule.one_policy:
                update_best_and_remove_policies(stage)
                if not (stage.is_sealed() and stage.is_trained()):
                    require_policy(stage)
                    run_phase(nodes, stage, "live", trainers + replicas)  # engines and trainers at the same time
            else:
                if not stage.is_sealed():
                    require_policy(stage)
                    run_phase(nodes, stage, "rollout", replicas)  # pi_stage generates; engines have all GPU memory
                update_best_and_remove_policies(stage)
                if until == ("rollout", stage.number):
                    return
                if not stage.is_trained():
                    require_policy(stage)
                    run_phase(nodes, stage, "optimize", trainers)  # S updates: pi_stage -> pi_stage+1
            if until is not None and until[1] == stage.number:
                return
        if run.end.due_evaluations():
            run_phase(nodes, run.end, "evaluate", run.end.rollout.workers)
        update_best_and_remove_policies(run.end)
    write_report([run.root], run.root / "report.html")


def rehearse(nodes: Nodes, run: RunDir) -> None:
    """Make updates on synthetic responses, their export and a checkpoint, on the layout of the recipe.

    It writes to ``run.rehearsal``, which is removed at the end. Raises `UserError` or `PhaseFailed` if any step fails.
    """
    shutil.rmtree(run.rehearsal, ignore_errors=True)  # left by a rehearsal that was killed
    try:
        run_phase(nodes, run.stage(0), "rehearse", run.recipe.actor.processes_per_node)
    except (PhaseFailed, UserError) as error:
        raise type(error)(
            "the rehearsal failed (updates on synthetic responses, their export and a checkpoint), so nothing was "
            f"generated: {error}"
        ) from error
    finally:
        shutil.rmtree(run.rehearsal, ignore_errors=True)


def optimizes(run: RunDir, until: tuple[str, int] | None) -> bool:
    """Whether `train`, stopping at ``until``, still has updates to make."""
    live = not run.recipe.schedule.one_policy
    stages = run.stages() if until is None else run.stages()[: until[1] + (live or until[0] == "optimize")]
    return any(not stage.is_trained() for stage in stages)


def summarise_run(run: RunDir) -> str:
    """The last lines that a training run prints: the gain in accuracy, model and report, a command to try next."""
    base, final = run.stage(0).evaluation(), run.end.evaluation()
    lines = []
    if base and final:
        suite = run.recipe.suites[0].name
        gain = difference(run.root, run.stage(0).first_update, run.root, run.end.first_update, suite)
        lines.append(
            f"held-out accuracy {base['accuracy']:.3f} -> {final['accuracy']:.3f}: {gain.text()} "
            f"(95 %, paired over {final['prompts']} prompts)"
        )
    lines += [
        f"model   {run.final}",
        f"report  {run.root / 'report.html'}",
    ]
    if run.recipe.schedule.one_policy:
        branch = f"--stage 0 --output {quoted(f'{run.root}-grpo')} --set objective.name=grpo"
        lines.append(f"next    megarl optimize {quoted(run.root)} {branch}")
    return "\n".join(lines)
