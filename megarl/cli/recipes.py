"""The commands ``plan``, ``simulate``, ``data``, ``init``: what there is to do before there is a run."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from megarl.cli.arguments import Commands, command, positive, settings
from megarl.errors import UserError
from megarl.planner.assumptions import UNITS, Assumptions, assume


def add_recipes(commands: Commands) -> None:
    sub = command(
        commands,
        "plan",
        _plan,
        "estimate memory and time of every phase on GPUs, or say what does not fit and what would",
    )
    sub.add_argument("recipe", type=Path)
    _on_gpus(sub)
    sub.add_argument("--json", action="store_true", help="print one JSON object, in bytes and seconds")
    settings(sub)

    sub = command(
        commands,
        "simulate",
        _simulate,
        "estimate the hours to N updates in stages, in lock-step and live, on the same GPUs",
    )
    sub.add_argument("recipe", type=Path)
    _on_gpus(sub)
    for name, kind, meaning in SCENARIO:
        sub.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="NUMBER", help=meaning)
    settings(sub)

    data = commands.add_parser("data", help="the prompts of a recipe").add_subparsers(required=True, metavar="COMMAND")
    sub = command(data, "show", _show_data, "print the first prompts as the model sees them, with their tokens")
    sub.add_argument("recipe", type=Path)
    sub.add_argument("--count", type=int, default=3, help="number of training and of held-out prompts; default: 3")
    settings(sub)

    sub = command(
        data, "check", _check_data, "check every row of the prompt files; exit code 1 if a run would stop at one"
    )
    sub.add_argument("recipe", type=Path)
    sub.add_argument("--json", action="store_true", help="print one JSON object")
    settings(sub)

    sub = command(commands, "init", _init, "write a recipe to begin with into this directory, and list the others")
    meaning = "such as qwen3_8b/m2po, default: a short one; or own_objective: an objective of your own, and its test"
    sub.add_argument("recipe", nargs="?", default="starter", help=meaning)


def _init(options: argparse.Namespace) -> None:
    from megarl.commands.init import init

    print(init(options.recipe, Path()))


def _on_gpus(sub: argparse.ArgumentParser) -> None:
    """Add the options that say which GPUs there are and what to assume about them."""
    sub.add_argument("--nodes", type=int, default=1, help="number of nodes; default: 1")
    sub.add_argument("--gpu", default="h200", help="a100, h100, h200, h20 or b200; default: h200")
    for item in fields(Assumptions):
        unit, meaning = UNITS[item.metadata["unit"]], item.metadata["of"]
        option, shown = f"--{item.name.replace('_', '-')}", unit.upper() or "NUMBER"
        sub.add_argument(option, type=float, metavar=shown, help=f"{unit} {meaning}".strip())


SCENARIO = (  # options of `megarl.planner.simulate.Scenario`
    ("updates", positive, "updates of the whole run; default: the recipe's"),
    ("stage", positive, "updates in a stage of the staged run; default: the recipe's"),
    (
        "sync_every",
        positive,
        "updates between two versions of the policy in the lock-step and live runs; default: the recipe's, or 4",
    ),
    ("lag", int, "largest lag of the live run, in updates; default: the recipe's, or that of the staged run"),
    ("handover", float, "seconds to load new weights into the engines; default: the time through shared storage"),
)


def _simulate(options: argparse.Namespace) -> None:
    from megarl.planner.simulate import make_simulation

    given = {name: getattr(options, name) for name, *_ in SCENARIO}
    found = make_simulation(options.recipe, options.nodes, options.gpu, options.set, assume(vars(options)), given)
    print("\n".join(found.table()))


def _plan(options: argparse.Namespace) -> None:
    from megarl.planner.fit import make_plan

    fit = make_plan(options.recipe, options.nodes, options.gpu, options.set, assume(vars(options)))
    if fit.misfit is not None and not options.json:
        raise UserError(fit.text())
    print(fit.as_json() if options.json else fit.text())
    if fit.misfit is not None:
        sys.exit(2)


def _show_data(options: argparse.Namespace) -> None:
    from megarl.recipe.load import load_recipe
    from megarl.views.prompts import show_prompts

    print(show_prompts(load_recipe(options.recipe, options.set), options.count))


def _check_data(options: argparse.Namespace) -> None:
    from megarl.recipe.load import load_recipe
    from megarl.views.prompts import check_prompts

    found = check_prompts(load_recipe(options.recipe, options.set))
    print(found.as_json() if options.json else found.text())
    if found.problems:
        sys.exit(1)
