"""The parser class and the argument types that the modules of the command line share."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megarl.errors import did_you_mean, nearest

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction["Parser"]
else:
    Commands = Any

UPDATE = "the policy of the stage after this many updates of the run, counted as on the screen and in metrics.jsonl"


class Parser(argparse.ArgumentParser):
    """An argument parser that suggests the nearest command or option for a misspelt one."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            hint = did_you_mean(str(value), map(str, action.choices))
            raise argparse.ArgumentError(action, f"{value!r} is unknown; {hint}")

    def refuse(self, unknown: list[str]) -> NoReturn:
        """Exit with the usage and an error about arguments that no parser knows."""
        options = [word[2:] for word in self._option_string_actions if word.startswith("--")]
        close = nearest(unknown[0][2:].partition("=")[0], options) if unknown[0].startswith("--") else None
        self.error(f"unrecognized arguments: {' '.join(unknown)}" + (f"; did you mean --{close}?" if close else ""))


def command(among: Commands, name: str, function: Any, help: str) -> Parser:
    """Add the command ``name``, which calls ``function`` with the parsed options; returns its parser."""
    sub = among.add_parser(name, help=help, description=help)
    sub.set_defaults(command=function, parser=sub)
    return sub


def add_run(sub: argparse.ArgumentParser) -> None:
    """Add the argument of commands about a run."""
    sub.add_argument("run_dir", type=Path, help="a run directory")


def add_stage(sub: argparse.ArgumentParser) -> None:
    """Add the arguments of commands about a stage of a run."""
    add_run(sub)
    sub.add_argument("--stage", type=int, required=True, help="number of the stage, from 0")


def settings(sub: argparse.ArgumentParser) -> None:
    """Add ``--set``, for commands that take recipe settings."""
    sub.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a recipe setting"
    )


def positive(text: str) -> int:
    """Argument type: an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)
