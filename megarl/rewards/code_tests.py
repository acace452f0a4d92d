"""Reads the tests of a prompt's row, which decide whether a program is right."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.data.prompts import Prompt
from megarl.errors import UserError

LANGUAGES = {"python": "python", "python3": "python", "py": "python", "cpp": "cpp", "c++": "cpp"}


@dataclass(frozen=True)
class InputOutput:
    """The standard input of a program, and the standard output that is expected of it."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class Assertions:
    """Python code with assertions about names that the program defines."""

    text: str
    entry_point: str | None  # the function under test; needed only if its name is that of a builtin function


@dataclass(frozen=True)
class Tests:
    """The tests of one row: either pairs of input and output, or assertions."""

    language: str
    pairs: tuple[InputOutput, ...] = ()
    assertions: Assertions | None = None


def read_tests(prompt: Prompt, language: str) -> Tests:
    """The tests in the column ``tests`` of the prompt's row, or else in its answer; `UserError` if they are unusable.

    language: that of programs for rows without a column ``language``.
    """
    row = prompt.entry["metadata"]
    language = _language(row.get("language") or language)
    found = row.get("tests") or prompt.answer
    if isinstance(found, str) and found.lstrip()[:1] in ("[", "{"):
        found = _from_json(found)
    if isinstance(found, Mapping):
        found = _pairs_of_lists(found, row)
    if isinstance(found, list) and found and all(isinstance(test, Mapping) for test in found):
        return Tests(language, pairs=tuple(map(_pair, found)))
    if isinstance(found, list) and found and all(isinstance(test, str) for test in found):
        found = "\n".join(found)
    if not isinstance(found, str) or not found.strip():
        raise UserError(
            'tests must be a list of {"input": ..., "output": ...}, {"inputs": [...], "outputs": [...]}, or Python '
            f"with assert statements; got {found!r:.60}"
        )
    if language != "python":
        raise UserError(
            f"this row's language is {language!r}, which needs pairs of input and output; assert statements and "
            f"fn_name are for Python only; got {found!r:.60}"
        )
    return Tests(language, assertions=_assertions(found, row))


def _language(name: object) -> str:
    language = LANGUAGES.get(name.lower()) if isinstance(name, str) else None
    if language is None:
        raise UserError(f"language {name!r} is not supported; known are {', '.join(LANGUAGES)}")
    return language


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # it may be Python code, which can begin with a bracket, too


def _pairs_of_lists(found: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
    """Convert {"inputs": [...], "outputs": [...]}, the form of APPS and TACO, to pairs, or to assert statements.

    The latter with "fn_name": each of the inputs is then a list of the function's arguments.
    """
    inputs, outputs = found.get("inputs"), found.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise UserError("tests need inputs and outputs, two lists of the same length")
    name = found.get("fn_name") or row.get("fn_name")
    if name is None:
        return [{"input": given, "output": expected} for given, expected in zip(inputs, outputs, strict=True)]
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"fn_name {name!r} is not the name of a function")
    if not all(isinstance(given, list) for given in inputs):
        raise UserError("with fn_name each of inputs must be a list of arguments")
    return [f"assert {name}(*{given!r}) == {expected!r}" for given, expected in zip(inputs, outputs, strict=True)]


def _pair(test: Mapping[str, Any]) -> InputOutput:
    given, expected = test.get("input"), test.get("output")
    if isinstance(given, list) and isinstance(expected, list):  # lists of lines
        given, expected = "\n".join(map(str, given)), "\n".join(map(str, expected))
    if not isinstance(given, str) or not isinstance(expected, str):
        raise UserError(f"a test needs input and output, both strings; got {dict(test)!r:.60}")
    return InputOutput(given, expected)


def _assertions(text: str, row: Mapping[str, Any]) -> Assertions:
    setup, entry_point = row.get("test_setup") or "", row.get("entry_point")
    text = f"{setup}\n{text}"
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UserError(f"the tests are not valid Python: {error}") from error
    if any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body) and entry_point:
        text += f"\ncheck({entry_point})\n"
    elif not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise UserError("the tests contain no assert statement")
    for node in ast.walk(tree):
        for name in _imported(node):
            if name not in sys.stdlib_module_names:
                raise UserError(f"the tests import {name!r}, but the sandbox has only Python's standard library")
    return Assertions(text, entry_point)


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [(node.module or "").split(".")[0]]
    return []
