"""The command line's ``plan`` and ``data``: what a recipe asks for, before there is a run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megarl.cli.arguments import Commands, command, settings
from megarl.errors import UserError


def add_before(commands: Commands) -> None:
    """The commands of this module."""
    sub = command(
        commands, "plan", _plan, "memory and time of every phase on GPUs, or what does not fit and what would"
    )
    sub.add_argument("recipe", type=Path)
    sub.add_argument("--nodes", type=int, default=1)
    sub.add_argument("--gpu", default="h200", help="a100, h100, h200 or b200; default: h200")
    sub.add_argument("--json", action="store_true", help="one JSON object, in bytes and seconds")
    settings(sub)

    data = commands.add_parser("data", help="the prompts of a recipe").add_subparsers(required=True, metavar="COMMAND")
    sub = command(data, "show", _show_data, "the first prompts as the model sees them, with their tokens")
    sub.add_argument("recipe", type=Path)
    sub.add_argument("--count", type=int, default=3, help="training and held-out prompts, each; default: 3")
    settings(sub)

    sub = command(data, "check", _check_data, "every row of a recipe's files; exit code 1 if a run would stop at one")
    sub.add_argument("recipe", type=Path)
    sub.add_argument("--json", action="store_true", help="one JSON object")
    settings(sub)


def _plan(options: argparse.Namespace) -> None:
    from megarl.views.fit import make_plan

    fit = make_plan(options.recipe, options.nodes, options.gpu, options.set)
    if fit.misfit is not None and not options.json:
        raise UserError(fit.text())
    print(fit.as_json() if options.json else fit.text())
    if fit.misfit is not None:
        sys.exit(2)


def _show_data(options: argparse.Namespace) -> None:
    from megarl.recipe.load import load_recipe
    from megarl.views.data import show_prompts

    print(show_prompts(load_recipe(options.recipe, options.set), options.count))


def _check_data(options: argparse.Namespace) -> None:
    from megarl.recipe.load import load_recipe
    from megarl.views.check_data import check_prompts

    found = check_prompts(load_recipe(options.recipe, options.set))
    print(found.as_json() if options.json else found.text())
    if found.problems:
        sys.exit(1)
