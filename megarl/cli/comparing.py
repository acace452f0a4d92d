"""The command line's ``sweep``, ``what-if`` and ``compare``: runs, objectives and policies beside each other."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from megarl.cli.arguments import Commands, command, positive
from megarl.errors import UserError


def add_beside(commands: Commands) -> None:
    """The commands of this module."""
    sub = command(commands, "sweep", _sweep, "runs beside each other, and one table; start it again to continue it")
    sub.add_argument("sweep", type=Path, help="a TOML file: docs/comparing.md")
    sub.add_argument("--output", type=Path, help="where the run directories go; default: the file's name without .toml")
    sub.add_argument("--jobs", type=positive, default=2, help="runs at a time; default: 2")
    sub.add_argument("--dry-run", action="store_true", help="count and list the runs, and start none")
    sub.add_argument("--json", action="store_true", help="the table, or the runs of --dry-run, as a JSON list")

    sub = command(commands, "what-if", _what_if, "every objective's gradient on the stored batches of a stage")
    sub.add_argument("run_dir", type=Path)
    sub.add_argument("--stage", type=int, required=True)
    sub.add_argument(
        "--update",
        type=int,
        action="append",
        default=[],
        help="a policy, by its updates in the stage; may be repeated; default: all that are there",
    )
    sub.add_argument("--batches", type=positive, default=8, help="of the stage, the last ones; default: 8")
    sub.add_argument(
        "--fresh-stage",
        type=int,
        metavar="K",
        help="a sealed stage that the policy of --update generated, as the fresh responses; default: new ones, by the "
        "built-in engine",
    )
    sub.add_argument("--fresh", type=Path, metavar="RUN", help="the run directory of --fresh-stage; default: the same")
    sub.add_argument("--figure", type=Path, help="write a page with charts along staleness")
    sub.add_argument("--json", action="store_true", help="one JSON list")

    sub = command(commands, "compare", _compare, "two policies on the prompts that both have answered")
    sub.add_argument("a", metavar="A", help="a run directory, or DIR:UPDATE, DIR:best; default: its last evaluation")
    sub.add_argument("b", metavar="B")
    sub.add_argument("--suite", help="default: every suite that both have")
    sub.add_argument("--json", action="store_true", help="one JSON list, an object a suite")


def _sweep(options: argparse.Namespace) -> None:
    from megarl import sweep

    output = options.output or options.sweep.with_suffix("")
    if options.dry_run:
        print(sweep.describe(options.sweep, output, options.jobs, options.json))
    else:
        print(sweep.sweep(options.sweep, output, options.jobs, options.json))


def _what_if(options: argparse.Namespace) -> None:
    from megarl.views.what_if import estimates, table, write_figure
    from megarl.what_if import what_if

    if options.fresh and options.fresh_stage is None:
        raise UserError("--fresh RUN: say with --fresh-stage which of its stages")
    fresh = None if options.fresh_stage is None else (options.fresh or options.run_dir, options.fresh_stage)
    rows = estimates(what_if(options.run_dir, options.stage, options.update, options.batches, fresh))
    print(json.dumps(rows) if options.json else table(rows, given=fresh is not None))
    if options.figure:
        write_figure(rows, f"{options.run_dir.name}, stage {options.stage}", options.figure)


def _compare(options: argparse.Namespace) -> None:
    from megarl.views.comparison import compare

    print(compare(options.a, options.b, options.suite, options.json))
