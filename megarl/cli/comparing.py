"""The commands ``eval``, ``sweep``, ``what-if`` and ``compare``: how good policies, runs and objectives are."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megarl.cli.arguments import UPDATE, Commands, add_stage, command, positive, settings


def add_comparing(commands: Commands) -> None:
    sub = command(commands, "eval", _evaluate, "evaluate a policy: avg@k, pass@k and maj@k with their intervals")
    sub.add_argument("model_or_run", type=Path, help="a run directory, for its newest policy, or a Hugging Face model")
    sub.add_argument("--recipe", type=Path, help="data and reward settings, when the model is not part of a run")
    sub.add_argument(
        "--suite",
        action="append",
        default=[],
        help="name of a suite of the recipe, prompt file or reasoning-gym generator; may be repeated; default: all "
        "suites of the recipe",
    )
    sub.add_argument("--output", type=Path, help="directory to keep the responses; an interrupted evaluation continues")
    sub.add_argument("--json", action="store_true", help="print a JSON list with one object per suite")
    settings(sub)

    sub = command(
        commands, "sweep", _sweep, "make and compare runs with different settings; start it again to continue it"
    )
    sub.add_argument("sweep", type=Path, help="a TOML file, see docs/comparing.md")
    sub.add_argument("--output", type=Path, help="directory for the runs; default: the file's name without .toml")
    sub.add_argument("--dry-run", action="store_true", help="count and list the runs, but start none")
    sub.add_argument("--json", action="store_true", help="print the table as a JSON list; not with --dry-run")

    sub = command(commands, "what-if", _what_if, "compare the gradients of all objectives on stored batches of a stage")
    add_stage(sub)
    sub.add_argument(
        "--update",
        type=int,
        action="append",
        default=[],
        help=f"{UPDATE}; may be repeated; default: all that exist",
    )
    sub.add_argument("--batches", type=positive, default=8, help="number of batches, the last of the stage; default: 8")
    sub.add_argument("--json", action="store_true", help="print a JSON list")

    sub = command(commands, "compare", _compare, "compare two policies on the prompts that both have answered")
    sub.add_argument(
        "a",
        metavar="A",
        help="an evaluated policy: DIR (the run's last evaluation), DIR:UPDATE of the run, or DIR:best",
    )
    sub.add_argument("b", metavar="B", help="the policy to compare it with")
    sub.add_argument("--suite", help="default: every suite on which both were evaluated")
    sub.add_argument("--json", action="store_true", help="print a JSON list with one object per suite")


def _evaluate(options: argparse.Namespace) -> None:
    from megarl.commands.evaluate import describe_evaluations, evaluate_model

    results = evaluate_model(options.model_or_run, options.recipe, options.suite, options.set, options.output)
    print(json.dumps(results) if options.json else describe_evaluations(results))


def _sweep(options: argparse.Namespace) -> None:
    from megarl.commands import sweep

    output = options.output or options.sweep.with_suffix("")
    if options.dry_run:
        print(sweep.describe(options.sweep, output))
    else:
        print(sweep.sweep(options.sweep, output, options.json))


def _what_if(options: argparse.Namespace) -> None:
    from megarl.commands.what_if import estimates, text_table, what_if

    rows = estimates(what_if(options.run_dir, options.stage, options.update, options.batches))
    print(json.dumps(rows) if options.json else text_table(rows))


def _compare(options: argparse.Namespace) -> None:
    from megarl.views.comparison import compare

    print(compare(options.a, options.b, options.suite, options.json))
