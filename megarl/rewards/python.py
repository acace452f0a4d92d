"""The verifier that calls a function in the user's own Python file: ``score(prompt, response, row) -> float | dict``.

It runs in the processes of `megarl.rewards.pool`, within their limits, and gets only texts and the prompt's row.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megarl.data.prompts import Prompt, PromptSource
from megarl.errors import UserError
from megarl.recipe.tables import Recipe, RewardTable
from megarl.rewards import Score, Verifier, read_score, row_of

Function = Callable[[str, Any, dict[str, Any]], Any]


def check(recipe: Recipe) -> None:
    """Raise `UserError` unless the file loads and has the function."""
    load_function(str(recipe.reward.path))


def build(table: RewardTable, prompts: PromptSource) -> Verifier:
    """See `VerifierModule`."""
    return Python(str(table.path))


class Python:
    """Scores with the function at ``path``, FILE.py:FUNCTION."""

    def __init__(self, path: str) -> None:
        self._path, self._function = path, load_function(path)

    def score(self, prompt: Prompt, response: str) -> Score:
        """The function returns the score, or {"score": ...} with an optional "reward" to train on instead."""
        return read_score(self._function(prompt.text, response, row_of(prompt)), self._path)

    def score_group(self, prompt: Prompt, responses: Sequence[str]) -> list[Score]:
        """The function gets a list of responses instead of one, and returns a list of as many scores."""
        found = self._function(prompt.text, list(responses), row_of(prompt))
        if not isinstance(found, list | tuple) or len(found) != len(responses):
            raise UserError(
                f"{self._path} returned {found!r:.60} for {len(responses)} responses: expected a list of as many scores"
            )
        return [read_score(each, self._path) for each in found]


def load_function(path: str) -> Function:
    """Load the function at ``path``, FILE.py:FUNCTION; `UserError` unless it takes (prompt, response, row)."""
    file, _, name = path.rpartition(":")
    if not Path(file).is_file():
        raise UserError(f"[reward] path = {path!r}: there is no file {file}")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise UserError(f"[reward] path = {path!r}: {file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"[reward] path = {path!r} cannot be loaded: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"[reward] path = {path!r}: {file} has no function {name!r}")
    try:
        inspect.signature(function).bind("prompt", "response", {})
    except TypeError as error:
        raise UserError(f"[reward] path = {path!r}: {name} must take (prompt, response, row): {error}") from None
    return function
