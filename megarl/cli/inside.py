"""The command line's ``samples``, ``sql``, ``trace`` and ``runs``: looking inside runs."""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path

from megarl.cli.arguments import Commands, command
from megarl.views.responses import COLOURINGS


def add_inside(commands: Commands) -> None:
    """The commands of this module."""
    _add_samples(commands)

    sub = command(commands, "sql", _sql, "a query over a run's responses, ledger, metrics, events and evaluations")
    sub.add_argument("run_dir", type=Path)
    sub.add_argument("query", help="such as 'select stage, avg(reward) from responses group by stage'")
    sub.add_argument("--memory", default="1GB", metavar="SIZE", help="what DuckDB may use; default: 1GB")
    sub.add_argument("--json", action="store_true", help="one JSON object a row, and all rows")

    sub = command(commands, "trace", _trace, "phases, updates and replicas of a run as a trace for Perfetto or Chrome")
    sub.add_argument("run_dir", type=Path)
    sub.add_argument("--output", type=Path, help="default: trace.json in the run directory")

    sub = command(commands, "runs", _runs, "the runs below a directory, with their state and last numbers")
    sub.add_argument("directory", type=Path)
    sub.add_argument("--json", action="store_true", help="one JSON object a run")


def _add_samples(commands: Commands) -> None:
    sub = command(commands, "samples", _samples, "responses of a run: what the model wrote")
    sub.add_argument("run_dir", type=Path)
    sub.add_argument("--stage", type=int, help="only of this stage, from 0")
    sub.add_argument("--prompt", type=int, metavar="ID", help="all responses to a prompt, beside each other")
    sub.add_argument("--sample", type=int, metavar="N", help="only the one with this number of each prompt's responses")
    sub.add_argument(
        "--reward", type=_range, default=(-math.inf, math.inf), metavar="MIN:MAX", help="one number, or a range"
    )
    sub.add_argument("--finish", metavar="REASON", help="how it ended: stop, length, timeout or unfinished")
    sub.add_argument("--longer", type=int, default=0, metavar="TOKENS", help="only those with more tokens")
    sub.add_argument("--shorter", type=int, metavar="TOKENS", help="only those with fewer tokens")
    sub.add_argument("--grep", type=_pattern, metavar="REGEX", help="only those whose text has it")
    sub.add_argument("--limit", type=int, help="how many; default: 10, and with --prompt all")
    sub.add_argument("--full", action="store_true", help="long texts uncut")
    sub.add_argument("--json", action="store_true", help="one JSON object a response, uncut")
    sub.add_argument("--tokens", choices=COLOURINGS, help="colour tokens; with --json, all values of every token")
    sub.add_argument(
        "--policy",
        metavar="UPDATE",
        help="under which policy: an update after which one was exported, final, best or a model directory; default: "
        "the one that the updates on the stage ended with",
    )
    sub.add_argument(
        "--set", action="append", default=[], metavar="objective.KEY=VALUE", help="under another objective"
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
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None


def _samples(options: argparse.Namespace) -> None:
    from megarl.views.responses.select import Filter
    from megarl.views.responses.show import show_samples

    wanted = Filter(
        stage=options.stage,
        prompt=options.prompt,
        sample=options.sample,
        reward=options.reward,
        finish=options.finish,
        longer=options.longer,
        shorter=options.shorter,
        pattern=options.grep,
    )
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
    from megarl.views.sql import as_json, as_table, query

    rows = query(options.run_dir, options.query, options.memory)
    if not options.json:
        print(as_table(rows))
        return
    for row in rows:
        print(as_json(row))


def _trace(options: argparse.Namespace) -> None:
    from megarl.views.trace import write_trace

    print(write_trace(options.run_dir, options.output or options.run_dir / "trace.json"))


def _runs(options: argparse.Namespace) -> None:
    from megarl.views.runs import as_json, as_table, list_runs

    lines = list_runs(options.directory)
    if not options.json:
        print(as_table(lines) if lines else f"no run below {options.directory}")
        return
    for line in lines:
        print(as_json(line))
