"""One phase alone: rollouts of an engine or of agents, updates of a stage or of a branch of it, a rehearsal."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from pathlib import Path

from megarl.commands.scratch import require_staged
from megarl.commands.stages.ingest import check_filled
from megarl.commands.train import rehearse
from megarl.errors import UserError
from megarl.phases.serve import KEY
from megarl.planner.preflight import check
from megarl.recipe.layout import BATCHES, TRAINING_TABLES
from megarl.recipe.load import Overrides, load_recipe, override_recipe, parse_override, recipe_diff
from megarl.recipe.tables import Recipe
from megarl.storage.files import make_directory, write_atomic
from megarl.storage.ledger import sealed_external
from megarl.storage.policies import copy_policy
from megarl.storage.run_dir import RESCORED, SCORED_BEFORE, RunDir, Stage
from megarl.storage.run_dir.checks import check_run
from megarl.storage.run_dir.evaluations import SuiteResponses
from megarl.storage.run_dir.retention import check_kept, require_policy, update_best_and_remove_policies
from megarl.views.progress import Progress
from megarl.views.report import write_report
from megarl.workers.launcher import run_phase
from megarl.workers.nodes import Nodes

NEED_NO_ANSWER = ("python", "http", "judge")  # kinds of rewards that can score a prompt of which only the text is known


def rehearse_recipe(nodes: Nodes, recipe_path: Path, overrides: list[str], scratch: Path) -> str:
    """`rehearse` a recipe without a run, in ``scratch``, which is removed at the end; returns the line to print."""
    recipe = load_recipe(recipe_path, overrides)
    check(nodes.starter, recipe, nodes.count)
    start = time.monotonic()
    try:
        run = RunDir.create(scratch, recipe)
        copy_policy(recipe.model.path, recipe.model.tokenizer_path, run.base)
        with Progress(run.root, recipe):
            rehearse(nodes, run)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return f"updates, their export and a checkpoint passed in {time.monotonic() - start:.0f} s"


def rollout_stage(nodes: Nodes, stage: Stage) -> None:
    """Generate and seal the rollouts of one stage."""
    require_staged(stage.run)
    check(nodes.starter, stage.run.recipe, nodes.count, optimizes=False)
    if _has_rollouts_to_make(stage):
        with Progress(stage.run.root, stage.run.recipe):
            run_phase(nodes, stage, "rollout", stage.rollout.workers)
        update_best_and_remove_policies(stage)
        print(f"sealed {stage.rollouts}")


def serve_stage(nodes: Nodes, stage: Stage, port: int) -> None:
    """Serve agents, through an OpenAI-compatible API, until they have filled ``stage``, then seal it. After a stop it
    can be called again to continue.

    port: to listen on at 127.0.0.1; 0 for any free port.
    """
    run = stage.run
    check_serving(nodes, run.recipe)
    if not _has_rollouts_to_make(stage):
        return
    if not (run.root / KEY).exists():  # the key of the run's agents, which only its owner can read
        write_atomic(run.root / KEY, secrets.token_urlsafe(32) + "\n", 0o600)
    run.send("request", port=port)
    where = f"http://127.0.0.1:{port}" if port else "the address that events.jsonl names"
    print(f"serving on {where}/GROUP/CONVERSATION/v1, with the key in {run.root / KEY}", flush=True)
    with Progress(run.root, run.recipe):
        run_phase(nodes, stage, "serve", 1)
    print(f"sealed {stage.rollouts}")


def check_serving(nodes: Nodes, recipe: Recipe) -> None:
    """`UserError` if agents cannot be served with this recipe, on these nodes or with what is installed here."""
    if nodes.count > 1:
        raise UserError(
            f"agents are served by one replica on one node: start `megarl serve` on one node, not {nodes.count}"
        )
    check_filled(recipe)
    if recipe.data.template == "raw":
        raise UserError('[data] template = "raw": agents send messages, so it must be "chat" or a .jinja file')
    if recipe.rollout.workers > 1:
        raise UserError(f"rollout.workers = {recipe.rollout.workers}: agents are served by one replica; set it to 1")
    check(nodes.starter, recipe, nodes.count, optimizes=False)


def _has_rollouts_to_make(stage: Stage) -> bool:
    """Whether the stage is not sealed; then its policy is there, or a `UserError` says what is missing."""
    run = stage.run
    check_run(run)
    if stage.number == 0 and not stage.policy.exists():
        copy_policy(run.recipe.model.path, run.recipe.model.tokenizer_path, stage.policy)
    if stage.is_sealed():
        print(f"{stage.rollouts} is sealed already")
        return False
    require_policy(stage)
    return True


def optimize_stage(nodes: Nodes, stage: Stage) -> None:
    """Make all updates of one stage on its sealed rollouts."""
    run = stage.run
    require_staged(run)
    check(nodes.starter, run.recipe, nodes.count)
    check_run(run)
    if stage.is_trained():
        print(f"stage {stage.number} is optimized already")
        return
    require_policy(stage)
    with Progress(run.root, run.recipe):
        run_phase(nodes, stage, "optimize", run.recipe.actor.processes_per_node)
    print(f"wrote {stage.next.policy}")


def optimize_branch(nodes: Nodes, source: Stage, target: Path, overrides: Overrides) -> None:
    """Optimize a stage with other settings in the new run directory ``target``, and evaluate before and after."""
    recipe = branch_recipe(source, overrides)
    check(nodes.starter, recipe, nodes.count)
    with RunDir(target.resolve(), recipe).lock():
        stage = branch(source, target, recipe)
        if recipe.reward != source.run.recipe.reward and not stage.is_sealed():
            run_phase(nodes, stage, "rescore", 1)
        if stage.run.unevaluated(stage.first_update) or stage.due_evaluations():
            run_phase(nodes, stage, "evaluate", stage.rollout.workers)
        optimize_stage(nodes, stage)
        if stage.run.unevaluated(stage.next.first_update):
            run_phase(nodes, stage.next, "evaluate", stage.next.rollout.workers)
        update_best_and_remove_policies(stage.next)
    write_report([stage.run.root], stage.run.root / "report.html")


def branch_recipe(source: Stage, overrides: Overrides) -> Recipe:
    """The recipe of a branch of ``source``: see `changed_recipe`.

    Raises `UserError` also if the policy, the rollouts or the checkpoint from which the stage starts do not exist.
    """
    source.run.check_prompts()
    recipe = changed_recipe(source, overrides)
    loads_optimizer = source.number > 0 or source.run.start() is not None
    if loads_optimizer and recipe.actor.lora != source.run.recipe.actor.lora:
        raise UserError(
            f"--set actor.lora: stage {source.number} starts from the optimizer state of earlier updates, which is of "
            "other adapters or of all weights; only stage 0 of a run without --continue-from starts from a new state"
        )
    check_kept(source)
    for path in _origins(source):
        if not path.exists():
            raise UserError(f"{path} does not exist: this stage cannot be optimized yet, or keep_stages removed it")
    return recipe


def changed_recipe(source: Stage, overrides: Overrides) -> Recipe:
    """The recipe of ``source`` with ``overrides``; `UserError` if these do not fit the rollouts that exist.

    In the first stage the batches may change too: another ``prompts_per_update`` or ``passes``. ``updates_per_stage``
    then follows from the number of groups, unless it is given.
    """
    before = source.run.recipe
    require_staged(source.run)
    recipe = override_recipe(before, [*overrides, *_updates_of_other_batches(before, overrides)])
    changed = [line for line in recipe_diff(before, recipe) if not line.startswith((*TRAINING_TABLES, "reward."))]
    if fixed := [line for line in changed if not line.startswith(BATCHES)]:
        settings = ", ".join((*TRAINING_TABLES, "reward.", *BATCHES))
        raise UserError(f"--set may only change {settings}, because the rollouts are reused: {fixed[0]}")
    if changed and source.number:
        raise UserError(f"--stage {source.number}: --set can change the batches of the first stage only: {changed[0]}")
    if recipe.groups_per_stage > before.groups_per_stage:
        raise UserError(
            f"the stage has {before.groups_per_stage} groups, but {recipe.schedule.updates_per_pass} updates of "
            f"{recipe.schedule.prompts_per_update} groups need {recipe.groups_per_stage}"
        )
    if recipe.reward != before.reward and before.leaves_groups:
        raise UserError("--set reward: not with rollout.token_budget: a stage trains groups that earlier ones scored")
    if recipe.reward != before.reward and sealed_external(source.rollouts) and recipe.reward.kind not in NEED_NO_ANSWER:
        raise UserError(
            f"--set reward: {source.rollouts} came from outside, with prompts that have no answers: reward.kind must "
            f"be one of {', '.join(NEED_NO_ANSWER)}"
        )
    if recipe.actor.trains_recorded_experts and not before.actor.trains_recorded_experts:
        raise UserError(
            f'[actor] routing_replay = "engine": rollouts of {source.run.root} have no recorded experts; use "actor"'
        )
    return recipe


def _updates_of_other_batches(before: Recipe, overrides: Overrides) -> list[str]:
    """If the overrides change the batch size or the passes: the override of updates_per_stage that uses all groups."""
    given = dict(map(parse_override, overrides))
    schedule = before.schedule.model_dump()
    try:
        sizes = {name: int(given.get(f"schedule.{name}", schedule[name])) for name in ("prompts_per_update", "passes")}
    except (ValueError, TypeError):
        return []  # the check of the recipe reports the mistake
    unchanged = all(sizes[name] == schedule[name] for name in sizes)
    if unchanged or "schedule.updates_per_stage" in given or min(sizes.values()) < 1:
        return []
    batches = before.groups_per_stage // sizes["prompts_per_update"]
    return [f"schedule.updates_per_stage={batches * sizes['passes']}"]


def _origins(source: Stage) -> list[Path]:
    """The policies, rollouts and checkpoints that optimizing the stage reads."""
    if source.number == 0:
        return [source.policy, source.rollouts]
    return [source.run.base, source.policy, source.rollouts, source.previous.checkpoints]


def branch(source: Stage, target: Path, recipe: Recipe) -> Stage:
    """Make the run directory ``target`` with links to the files of the stage ``source``; returns the stage in it."""
    stage = RunDir.create(target, recipe).stage(source.number)
    links = {stage.run.root / path.relative_to(source.run.root): path for path in _origins(source)}
    if recipe.reward != source.run.recipe.reward:  # the stage's rollouts will be those that the rescore phase writes
        links[stage.run.root / SCORED_BEFORE / stage.directory.name] = source.rollouts
        links[stage.rollouts] = stage.run.root / RESCORED / stage.directory.name
        make_directory(links[stage.rollouts])
    if source.number == 0 and (start := source.run.start()):
        stage.run.start_from(start)
    for link, path in links.items():
        make_directory(link.parent)
        if not link.is_symlink():
            os.symlink(path, link)
    for suite in recipe.suites:
        base = source.run.evaluation(source.first_update, suite.name)
        same_verifier = recipe.reward == source.run.recipe.reward
        if base and same_verifier and stage.run.evaluation(source.first_update, suite.name) is None:
            _link_evaluation(source, stage, suite.name)
            stage.run.log_event(**{key: value for key, value in base.items() if key != "time"})
    return stage


def _link_evaluation(source: Stage, stage: Stage, suite: str) -> None:
    theirs, ours = (SuiteResponses.of(each.run.root, suite) for each in (source, stage))
    if theirs.prompts.exists():
        make_directory(ours.directory)
        for place in (theirs.prompts, theirs.responses(source.first_update)):
            link = ours.directory / place.name
            link.unlink(missing_ok=True)
            link.symlink_to(place)
