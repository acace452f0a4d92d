"""The commands that show and verify runs: ``samples``, ``sql``, ``report``, ``audit``."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from dataclasses import fields
from pathlib import Path

from megarl.cli.arguments import Commands, add_run, command
from megarl.errors import UserError
from megarl.views.responses import COLOURINGS


def add_runs(commands: Commands) -> None:
    _add_samples(commands)

    sub = command(commands, "sql", _sql, "query a run's responses, metrics and events with SQL")
    add_run(sub)
    sub.add_argument("query", help="such as 'select stage, avg(reward) from responses group by stage'")
    sub.add_argument("--memory", default="1GB", metavar="SIZE", help="memory that DuckDB may use; default: 1GB")
    sub.add_argument("--json", action="store_true", help="print all rows, one JSON object per row")

    sub = command(commands, "report", _report, "write a self-contained HTML page about one or several runs")
    sub.add_argument("run_dirs", type=Path, nargs="+")
    sub.add_argument("--output", type=Path, help="the HTML file; default for one run: report.html in its directory")

    sub = command(
        commands, "audit", _audit, "verify that everything in a run directory is consistent; exit code 1 if it is not"
    )
    add_run(sub)
    sub.add_argument("--samples", type=int, default=16, help="groups per stage to score again; default: 16")
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def _add_samples(commands: Commands) -> None:
    sub = command(commands, "samples", _samples, "show responses of a run")
    add_run(sub)
    sub.add_argument("--stage", type=int, help="only responses of this stage, from 0")
    sub.add_argument("--prompt", type=int, metavar="ID", help="all responses to this prompt")
    sub.add_argument("--sample", type=int, metavar="N", help="only response number N to each prompt, from 0")
    sub.add_argument(
        "--reward",
        type=_range,
        default=(-math.inf, math.inf),
        metavar="MIN:MAX",
        help="only responses with this reward, one number or a range",
    )
    sub.add_argument("--grep", dest="pattern", type=_pattern, metavar="REGEX", help="only responses whose text matches")
    sub.add_argument("--limit", type=int, help="number of responses to show; default: 10, with --prompt all")
    sub.add_argument("--full", action="store_true", help="do not shorten long texts")
    sub.add_argument("--json", action="store_true", help="print one JSON object per response, with full texts")
    sub.add_argument(
        "--tokens", choices=COLOURINGS, help="colour tokens by this quantity; with --json, all values of every token"
    )
    sub.add_argument(
        "--policy",
        metavar="UPDATE",
        help="with --tokens: the policy to use, by an update after which one was exported, final, best or a model "
        "directory; default: the policy after all updates of the stage",
    )
    sub.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="objective.KEY=VALUE",
        help="with --tokens: use another objective or other settings of it",
    )


def _range(text: str) -> tuple[float, float]:
    low, colon, high = text.partition(":")
    try:
        bounds = float(low or "-inf"), float((high or "inf") if colon else low)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number nor a range such as 0:0.5, 0.5: or :0"
        ) from None
    return bounds


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


def _samples(options: argparse.Namespace) -> None:
    from megarl.views.responses.select import Filter
    from megarl.views.responses.show import show_samples

    wanted = Filter(**{field.name: getattr(options, field.name) for field in fields(Filter)})
    show_samples(
        options.run_dir,
        wanted,
        options.limit or (10 if options.prompt is None else sys.maxsize),
        as_json=options.json,
        whole=options.full,
        colouring=options.tokens,
        policy=options.policy,
        overrides=options.set,
    )


def _sql(options: argparse.Namespace) -> None:
    from megarl.views.sql import as_table, query

    rows = query(options.run_dir, options.query, options.memory)
    if not options.json:
        print(as_table(rows))
        return
    for row in rows:
        print(json.dumps(row, default=str))  # values that JSON has no type for become text


def _report(options: argparse.Namespace) -> None:
    from megarl.views.report import write_report

    if len(options.run_dirs) > 1 and not options.output:
        raise UserError("a report on several runs needs --output FILE")
    output = options.output or options.run_dirs[0] / "report.html"
    print(write_report(options.run_dirs, output))


def _audit(options: argparse.Namespace) -> None:
    from megarl.views.audit import audit

    found = audit(options.run_dir, options.samples)
    print(found.as_json() if options.json else found.table())
    if found.problems:
        sys.exit(1)
