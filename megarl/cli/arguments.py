"""What the modules of the command line share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = Any


def command(among: Commands, name: str, function: Any, help: str) -> argparse.ArgumentParser:
    """A command among others, which calls ``function`` with its options."""
    sub = among.add_parser(name, help=help, description=help)
    sub.set_defaults(command=function, parser=sub)
    return sub


def settings(sub: argparse.ArgumentParser) -> None:
    """``--set``, for commands that take recipe settings."""
    sub.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a recipe setting"
    )


def positive(text: str) -> int:
    """A whole number from 1 on, as an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)
