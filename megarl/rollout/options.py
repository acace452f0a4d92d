"""Checks the tables ``[rollout.vllm]`` and ``[rollout.sglang]`` with the engine's own argument parser."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.errors import UserError

# Runs in a separate interpreter, because importing an engine takes seconds and may look for GPUs. It prints the names
# that occur both in megarl's own arguments and in the recipe's table.
_PROGRAM = """
import argparse, json, sys
{parser}
own, more = json.loads(sys.argv[1])
parser.parse_args([*own, *more])
names = [{{parser._option_string_actions[name].dest for name in group if name in parser._option_string_actions}}
    for group in (own, more)]
print("\\n" + json.dumps(sorted(names[0] & names[1])))
"""


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """``{"max_num_seqs": 8, "enforce_eager": True}`` as ``--max-num-seqs 8 --enforce-eager``; tables become JSON."""
    arguments: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            arguments += [f"--{flag}", *map(str, value)]
        else:
            arguments += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return arguments


def check_options(
    engine: str,
    options: Mapping[str, Any],
    own: Sequence[str],
    python: Path,
    parser: str,
    environment: Mapping[str, str],
) -> None:
    """Raise `UserError` for options that the engine does not know, refuses, or that megarl sets itself.

    own: the arguments with which megarl starts the engine. python: the interpreter that has the engine. parser: Python
    statements that assign the engine's argument parser to ``parser``. environment: of the interpreter's process.
    """
    if options:
        more, place = json.dumps(as_arguments(options)), f"[rollout.{engine}]"
        _check(place, json.dumps(list(own)), more, python, parser, json.dumps(dict(environment)))


@functools.cache  # stages that use the same engine make the same check
def _check(place: str, own: str, more: str, python: Path, parser: str, environment: str) -> None:
    command = [str(python), "-W", "ignore", "-c", _PROGRAM.format(parser=parser), f"[{own}, {more}]"]
    result = subprocess.run(command, capture_output=True, text=True, env=json.loads(environment))
    if result.returncode:
        last = ([line for line in result.stderr.splitlines() if line.strip()] or ["it gave no reason"])[-1]
        raise UserError(f"{place}: the engine's own argument parser refuses {' '.join(json.loads(more))}: {last}")
    if reserved := json.loads(result.stdout.splitlines()[-1]):
        raise UserError(f"{place} {', '.join(reserved)}: remove this here, megarl sets it itself from the recipe")
