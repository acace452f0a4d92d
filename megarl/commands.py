"""The commands beside ``megarl train``: one phase alone, a branch, an export, and the evaluation of any model."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from megarl.errors import UserError
from megarl.models.hf_config import read_hf_config
from megarl.models.lora import check_exported_alone
from megarl.recipe.data_table import FILES
from megarl.recipe.eval_table import SuiteTable, default_name
from megarl.recipe.layout import TRAINING_TABLES
from megarl.recipe.load import Overrides, load_recipe, override_recipe, parse_override, recipe_diff
from megarl.recipe.tables import Recipe
from megarl.scratch import check_updates, open_stage, run_scratch_phase
from megarl.storage.best import update_best_and_remove_policies
from megarl.storage.checkpoints import checkpoints
from megarl.storage.evaluations import SuiteResponses
from megarl.storage.files import make_directory
from megarl.storage.ledger import sealed_external
from megarl.storage.origin import RESCORED, SCORED_BEFORE, link_start, start_of
from megarl.storage.policies import check_policy, copy_policy, dequantised_model
from megarl.storage.retention import check_kept, require_policy
from megarl.storage.run_checks import check_run
from megarl.storage.run_dir import RunDir, Stage
from megarl.storage.trackers import NONE as NO_TRACKERS
from megarl.train import rehearse
from megarl.views.progress import Progress
from megarl.views.report import write_report
from megarl.workers.launcher import run_phase
from megarl.workers.nodes import NodeRank, Nodes
from megarl.workers.preflight import check

# settings that keep the rollouts but divide them into other batches
BATCHES = ("schedule.prompts_per_update", "schedule.passes", "schedule.updates_per_stage")


def rehearse_recipe(nodes: Nodes, recipe_path: Path, overrides: list[str], scratch: Path) -> str:
    """`rehearse` a recipe without a run, in ``scratch``, which is removed at the end; returns the line to print."""
    recipe = load_recipe(recipe_path, overrides)
    check(nodes.starter, recipe, nodes.count)
    start = time.monotonic()
    try:
        run = RunDir.create(scratch, recipe)
        nodes.starter.prepare(run.root)
        copy_policy(recipe.model.path, recipe.model.tokenizer_path, run.base)
        with Progress(run.root, recipe):
            rehearse(nodes, run)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return f"an update, its export and a checkpoint passed in {time.monotonic() - start:.0f} s"


def rollout_stage(nodes: Nodes, stage: Stage) -> None:
    """Generate and seal the rollouts of one stage."""
    _require_staged(stage.run)
    run = stage.run
    check(nodes.starter, run.recipe, nodes.count, optimizes=False)
    check_run(run)
    if stage.number == 0 and not stage.policy.exists():
        copy_policy(run.recipe.model.path, run.recipe.model.tokenizer_path, stage.policy)
    if stage.is_sealed():
        print(f"{stage.rollouts} is sealed already")
        return
    require_policy(stage)
    with Progress(run.root, run.recipe):
        run_phase(nodes, stage, "rollout", stage.rollout.workers)
    update_best_and_remove_policies(stage)
    print(f"sealed {stage.rollouts}")


def optimize_stage(nodes: Nodes, stage: Stage) -> None:
    """Make all updates of one stage on its sealed rollouts."""
    run = stage.run
    _require_staged(run)
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
        if recipe.reward != source.run.recipe.reward:
            if not stage.is_sealed():
                run_phase(nodes, stage, "rescore", 1)
            if stage.due_evaluations():
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
    loads_optimizer = source.number > 0 or start_of(source.run) is not None
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
    _require_staged(source.run)
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
    if recipe.reward != before.reward and before.rollout.token_budget is not None:
        raise UserError("--set reward: not with rollout.token_budget: a stage trains groups that earlier ones scored")
    if recipe.reward != before.reward and sealed_external(source.rollouts):
        raise UserError(
            f"--set reward: {source.rollouts} came from outside, with prompts that the recipe does not have"
        )
    if recipe.actor.routing_replay == "engine" and before.actor.routing_replay != "engine":
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
    if source.number == 0 and (start := start_of(source.run)):
        link_start(stage.run, start)
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


def export_policy(run_dir: Path, number: int, updates: int, output: Path, adapters: bool = False) -> str:
    """Write a policy as the Hugging Face directory ``output``; returns the line to print.

    updates: which policy, by the number of updates of stage ``number`` that it has had.
    adapters: write only the adapters of a run with ``[actor.lora]``, in PEFT's format.
    """
    stage = open_stage(run_dir, number)
    check_updates(stage, [updates])
    if adapters:
        _check_has_adapters(stage, updates)
    if output.exists():
        raise UserError(f"{output} exists already: give --output a directory that does not exist")
    make_directory(output.resolve().parent)
    run_scratch_phase(stage, "export", update=updates, output=str(output.resolve()), adapters=adapters)
    return f"wrote {output}"


def _check_has_adapters(stage: Stage, updates: int) -> None:
    """`UserError` unless there is a checkpoint after ``updates``: exported policies have the adapters merged in."""
    if stage.run.recipe.actor.lora is None:
        raise UserError(f"--adapters: {stage.run.root} has no adapters: its recipe has no [actor.lora]")
    check_exported_alone(stage.run.recipe, read_hf_config(stage.run.stage(0).policy))
    saved = [update for update, _ in checkpoints(stage.checkpoints)]
    if updates not in saved:
        raise UserError(
            f"--adapters: of update {updates} of stage {stage.number} there is no checkpoint, only a policy with the "
            f"adapters merged in; the stage has checkpoints of these updates: {', '.join(map(str, saved)) or 'none'}"
        )


def evaluate_checkpoint(
    run_dir: Path, place: tuple[int, int], suites: list[str], overrides: list[str], output: Path | None
) -> list[dict[str, Any]]:
    """`evaluate_model` of any policy of a run. place: (stage, number of its updates that the policy has had)."""
    with tempfile.TemporaryDirectory(prefix="megarl-policy-") as scratch:
        policy = (output or Path(scratch)).resolve() / "policies" / f"stage_{place[0]:03d}_update_{place[1]:06d}"
        if not policy.exists():
            export_policy(run_dir, *place, policy)
        return evaluate_model(run_dir, None, suites, overrides, output, policy)


def evaluate_model(
    target: Path,
    recipe_path: Path | None,
    suites: list[str],
    overrides: list[str],
    output: Path | None,
    exported: Path | None = None,
) -> list[dict[str, Any]]:
    """Evaluate a policy on some suites; returns the evaluation of each suite.

    target: a run directory, whose newest policy is evaluated (or ``exported``, if given), or a Hugging Face directory.
    recipe_path: data and reward settings, needed if ``target`` is not a run directory.
    suites: names of the recipe's suites, prompt files or generators; empty: all suites of the recipe.
    output: a run directory, made if needed, that keeps the responses; an interrupted evaluation continues there.
    """
    if not target.is_dir():
        raise UserError(f"{target} is not a directory")
    run = RunDir.open(target) if (target / "recipe.toml").exists() else None
    if run is not None:
        before, policy = run.recipe, exported or _newest_policy(run)
        if policy != before.model.path:
            check_policy(policy, "Restore it from a copy")
    elif recipe_path is not None:
        before, policy = load_recipe(recipe_path), target.resolve()
    else:
        raise UserError(f"{target} is not a run directory: use --recipe to say which data and reward to use")
    recipe = override_recipe(_with_suites(before, suites), overrides)
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update=NO_TRACKERS)})
    heldout = max((suite.prompts for suite in before.suites if not suite.own), default=0)
    if not recipe.suites or any(suite.prompts > heldout for suite in recipe.suites if not suite.own):
        raise UserError(f"only {heldout} prompts are held out from training; use --suite FILE to evaluate on others")
    if run is not None and not all(suite.own for suite in recipe.suites):
        run.check_prompts()
    with tempfile.TemporaryDirectory(prefix="megarl-eval-") as scratch, Nodes(NodeRank()) as nodes:
        model = recipe.model.model_copy(update={"path": policy, "tokenizer": None})
        check(nodes.starter, recipe.model_copy(update={"model": model}), optimizes=False)
        root = (output or Path(scratch) / "run").resolve()
        results = _evaluate_in(RunDir(root, recipe), dequantised_model(policy, root / "policies"), nodes)
    return [{**result, "policy": str(policy)} for result in results]


def describe_evaluations(results: list[dict[str, Any]]) -> str:
    """The text that ``megarl eval`` prints."""
    lines = [line for result in results for line in _describe(result, len(results) > 1)]
    return "\n".join([*dict.fromkeys(result["policy"] for result in results), *lines])


def _with_suites(recipe: Recipe, suites: list[str]) -> Recipe:
    """The recipe with exactly these suites; unchanged if ``suites`` is empty."""
    if not suites:
        return recipe
    table = recipe.eval
    known = {suite.name: suite for suite in table.suites}
    for suite in () if known else recipe.suites:
        known[suite.name] = SuiteTable(name=suite.name, suite=table.suite, source=table.source, data=table.data)
    chosen = [known.get(name) or _suite_of(name) for name in suites]
    if len({suite.name for suite in chosen}) < len(chosen):
        raise UserError(f"--suite: two of {', '.join(suites)} have the same name")
    changes: dict[str, Any] = {
        "suite": None,
        "source": None,
        "data": {},
        "suites": chosen,
        "every": max(1, table.every),
    }
    return recipe.model_copy(update={"eval": table.model_copy(update=changes)})


def _suite_of(data: str) -> SuiteTable:
    """A suite made of ``data``, a prompt file or generator that the recipe does not name."""
    source: Literal["file", "reasoning_gym"] = "reasoning_gym"
    if Path(data).suffix in FILES:
        source, data = "file", str(Path(data).resolve())
    return SuiteTable(name=default_name(source, data), source=source, suite=data)


def _evaluate_in(run: RunDir, policy: Path, nodes: Nodes) -> list[dict[str, Any]]:
    """Evaluate ``policy`` in the run directory ``run``, which is of this policy alone; reuses evaluations in it."""
    with run.lock():
        stage = RunDir.create(run.root, run.recipe).stage(0)
        make_directory(stage.directory)
        if stage.policy.exists() and stage.policy.resolve() != policy.resolve():
            raise UserError(f"{run.root} has evaluations of {stage.policy.resolve()}: use another --output")
        if not stage.policy.exists():
            stage.policy.symlink_to(policy)
        if stage.run.unevaluated(0):
            run_phase(nodes, stage, "evaluate", stage.rollout.workers)
        return [result for suite in run.recipe.suites if (result := stage.run.evaluation(0, suite.name))]


def _describe(result: dict[str, Any], with_name: bool) -> Iterator[str]:
    """One line for each estimate, with its interval; pass@k for powers of 2 and for all samples."""
    n = result["samples"]
    if with_name:
        yield result["suite"]
    yield _estimate(f"avg@{n}", result["accuracy"], result["ci95"], result["prompts"])
    for k in range(2, n + 1):
        if k == n or k & (k - 1) == 0:
            value, bounds = result["pass_at"][k - 1], result["pass_at_ci95"][k - 1]
            yield _estimate(f"pass@{k}", value, bounds, result["prompts"])
    if "maj_at_k" in result:
        yield _estimate(f"maj@{n}", result["maj_at_k"], result["maj_at_k_ci95"], result["prompts"])


def _estimate(name: str, value: float, interval: list[float], prompts: int) -> str:
    return f"{name} {value:.4f}  95 % interval [{interval[0]:.4f}, {interval[1]:.4f}]  {prompts} prompts"


def _newest_policy(run: RunDir) -> Path:
    policies = [stage.policy for stage in [run.end, *reversed(run.stages())] if stage.policy.exists()]
    return policies[0] if policies else run.recipe.model.path


def _require_staged(run: RunDir) -> None:
    if run.recipe.schedule.kind == "live":
        raise UserError(
            f"{run.root} is a live run: `megarl train` makes its rollouts and updates at the same time, so no phase of "
            "it can run alone"
        )


def summarise_run(run: RunDir) -> str:
    """The last lines that a training run prints: the gain in accuracy, model and report, a command to try next."""
    base, final = run.stage(0).evaluation(), run.end.evaluation()
    lines = []
    if base and final:
        gain = final["accuracy"] - base["accuracy"]
        squares = [((r["ci95"][1] - r["ci95"][0]) / 2) ** 2 for r in (base, final)]  # of the intervals' half widths
        lines.append(
            f"held-out accuracy {base['accuracy']:.3f} -> {final['accuracy']:.3f}: "
            f"{gain:+.3f} +- {sum(squares) ** 0.5:.3f} (95 %, {final['prompts']} prompts)"
        )
    lines += [
        f"model   {run.final}",
        f"report  {run.root / 'report.html'}",
    ]
    if run.recipe.schedule.kind == "staged":
        lines.append(f"next    megarl optimize {run.root} --stage 0 --output {run.root}-grpo --set objective.name=grpo")
    return "\n".join(lines)
