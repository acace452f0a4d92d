"""The verifier for mathematics: math-verify decides whether the final answer equals the reference answer.

The answer of a response is its last ``\\boxed{...}``. In a response without one math-verify looks for an answer, unless
``reward.boxed`` requires a box.

A hostile formula can cost SymPy hours or all memory. math-verify's own timeout works only in the main thread and
between two bytecodes, so it is turned off, and `megarl.rewards.pool` ends a worker that takes too long.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from megarl.data.boxes import last_box
from megarl.data.prompts import Prompt, PromptSource
from megarl.errors import UserError
from megarl.recipe.tables import Recipe, RewardTable
from megarl.rewards import Verifier, check_rows, right_answer

NUMBER = re.compile(r"-?\d+(\.\d+)?")
DOLLAR = re.compile(r"(?<!\\)\$")  # delimits a formula, whereas \$ is a dollar sign


def check(recipe: Recipe) -> None:
    """Raise `UserError` if an answer in a prompt file cannot be parsed. Items of generators are checked when scored."""
    verifier = Math(recipe.reward)
    # plain numbers are most of the answers in most files; parsing them would take a millisecond each
    check_rows(recipe, lambda prompt: NUMBER.fullmatch(prompt.answer.strip()) or verifier.gold(prompt))


def build(table: RewardTable, prompts: PromptSource) -> Verifier:
    """See `VerifierModule`."""
    return Math(table)


class Math:
    """Scores 1 or 0."""

    def __init__(self, table: RewardTable) -> None:
        import math_verify  # takes a second, so only processes that score import it

        self._library, self._boxed = math_verify, table.boxed
        self._parse_answer = functools.lru_cache(1024)(self._parse_uncached)

    def score(self, prompt: Prompt, response: str) -> float:
        gold, answer = self.gold(prompt), last_box(response)
        if answer is None and self._boxed:
            return 0.0
        try:
            found = self._library.parse(response if answer is None else f"\\boxed{{{answer}}}", parsing_timeout=None)
            return float(self._library.verify(gold, found, timeout_seconds=None))
        except MemoryError:
            raise
        except Exception:  # SymPy raises many kinds on text that it cannot parse or compare: the response is wrong
            return 0.0

    def gold(self, prompt: Prompt) -> list[Any]:
        """The parsed reference answer; `UserError` if math-verify cannot parse it."""
        answer = right_answer(prompt)
        gold = self._parse_answer(answer)
        if not gold:
            raise UserError(
                f"the answer {answer[:60]!r} of prompt {prompt.text[:60]!r} cannot be parsed as mathematics; "
                'use reward.kind = "exact"'
            )
        return gold

    def _parse_uncached(self, answer: str) -> list[Any]:
        """Parse a reference answer: bare (42, 1/2, \\frac{1}{2}, \\$18.90), or text with $...$ or \\boxed{...}."""
        formula = answer if DOLLAR.search(answer) or "\\boxed" in answer else f"${answer}$"
        return self._library.parse(formula, parsing_timeout=None)
