"""Export and evaluation of policies: of a run, any of its checkpoints, or any Hugging Face model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from megarl.commands.scratch import open_staged, run_scratch_phase, updates_within
from megarl.errors import UserError
from megarl.models.hf_config import read_hf_config
from megarl.models.lora import check_exported_alone
from megarl.planner.preflight import check
from megarl.recipe.data_table import FILES
from megarl.recipe.eval_table import SuiteTable, default_name
from megarl.recipe.load import load_recipe, override_recipe
from megarl.recipe.tables import Recipe
from megarl.storage.checkpoints import checkpoints
from megarl.storage.files import check_new, make_directory
from megarl.storage.metrics.trackers import NONE as NO_TRACKERS
from megarl.storage.policies import INFO_FILE
from megarl.storage.run_dir import RunDir, Stage, checks
from megarl.workers.launcher import run_phase
from megarl.workers.nodes import NodeRank, Nodes


def export_policy(run_dir: Path, number: int, update: int, output: Path, adapters: bool = False) -> str:
    """Write a policy as the Hugging Face directory ``output``; returns the line to print.

    update: which policy of stage ``number``, by the number of updates of the run that it has had.
    adapters: write only the adapters of a run with ``[actor.lora]``, in PEFT's format.
    """
    stage = open_staged(run_dir, number)
    (updates,) = updates_within(stage, [update])
    if adapters:
        _check_has_adapters(stage, updates)
    check_new(output)
    make_directory(output.resolve().parent)
    run_scratch_phase(stage, "export", update=updates, output=str(output.resolve()), adapters=adapters)
    return f"wrote {output}"


def _check_has_adapters(stage: Stage, updates: int) -> None:
    """`UserError` unless there is a checkpoint after ``updates``: exported policies have the adapters merged in."""
    if stage.run.recipe.actor.lora is None:
        raise UserError(f"--adapters: {stage.run.root} has no adapters: its recipe has no [actor.lora]")
    check_exported_alone(stage.run.recipe, read_hf_config(stage.run.stage(0).policy))
    first = stage.first_update
    saved = [first + update for update, _ in checkpoints(stage.checkpoints)]
    if first + updates not in saved:
        raise UserError(
            f"--adapters: of update {first + updates} of stage {stage.number} there is no checkpoint, only a policy "
            "with the adapters merged in; the stage has checkpoints of these updates: "
            f"{', '.join(map(str, saved)) or 'none'}"
        )


def evaluate_model(
    target: Path, recipe_path: Path | None, suites: list[str], overrides: list[str], output: Path | None
) -> list[dict[str, Any]]:
    """Evaluate a policy on some suites; returns the evaluation of each suite.

    target: a run directory, whose newest policy is evaluated, or a Hugging Face directory.
    recipe_path: data and reward settings, needed if ``target`` is not a run directory.
    suites: names of the recipe's suites, prompt files or generators; empty: all suites of the recipe.
    output: a run directory, made if needed, that keeps the responses; an interrupted evaluation continues there.
    """
    if not target.is_dir():
        raise UserError(f"{target} is not a directory")
    run = RunDir.open(target) if (target / "recipe.toml").exists() else None
    if run is not None:
        policies = (stage.policy for stage in [run.end, *reversed(run.stages())] if stage.policy.exists())
        before, policy = run.recipe, next(policies, run.recipe.model.path)
    elif recipe_path is not None:
        before, policy = load_recipe(recipe_path), target.resolve()
    else:
        raise UserError(f"{target} is not a run directory: use --recipe to say which data and reward to use")
    if (policy / INFO_FILE).exists():  # else it is a model that megarl did not write
        checks.check(policy, "Restore it from a copy")
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
        results = _evaluate_in(RunDir(root, recipe), policy, nodes)
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
        "data": table.data if table.suites else {},  # of all suites that have a file, or of the only one
        "suites": chosen,
        "every": max(1, table.every),
    }
    return recipe.model_copy(update={"eval": table.model_copy(update=changes)})


def _suite_of(data: str) -> SuiteTable:
    """A suite made of ``data``, a prompt file or generator that the recipe does not name."""
    source: Literal["file", "reasoning_gym"] = "reasoning_gym"
    if Path(data).suffix in FILES:
        source, data = "file", str(Path(data).absolute())
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
