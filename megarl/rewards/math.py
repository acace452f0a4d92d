"""Mathematical equality of the final answers, decided by math-verify.

The last ``\\boxed{...}`` of a response is its answer. In a response without one math-verify looks for the answer,
unless ``reward.boxed`` asks for a box.

A hostile formula can cost SymPy hours or all memory, and math-verify's own time limit works only in the main thread and
between two bytecodes: so it is told to keep none, and `megarl.rewards.pool` ends what takes too long.
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
DOLLAR = re.compile(r"(?<!\\)\$")  # of a formula; \$ is money


def check(recipe: Recipe) -> None:
    """Every answer of a prompt file must be mathematics; a generator's is a `UserError` when it is met."""
    verifier = Math(recipe.reward)
    # numbers are most of most files, and take a millisecond each to parse
    check_rows(recipe, lambda prompt: NUMBER.fullmatch(prompt.answer.strip()) or verifier.gold(prompt))


def build(table: RewardTable, prompts: PromptSource) -> Verifier:
    """See `VerifierModule`."""
    return Math(table)


class Math:
    """Scores 1 or 0."""

    def __init__(self, table: RewardTable) -> None:
        import math_verify  # a second, which only the process that scores has to wait for

        self._library, self._boxed = math_verify, table.boxed
        self._parse_answer = functools.lru_cache(1024)(self._parse_answer_anew)

    def score(self, prompt: Prompt, response: str) -> float:
        gold, answer = self.gold(prompt), last_box(response)
        if answer is None and self._boxed:
            return 0.0
        try:
            found = self._library.parse(response if answer is None else f"\\boxed{{{answer}}}", parsing_timeout=None)
            return float(self._library.verify(gold, found, timeout_seconds=None))
        except MemoryError:
            raise
        except Exception:  # whatever SymPy raises on what it cannot read or compare: it is wrong
            return 0.0

    def gold(self, prompt: Prompt) -> list[Any]:
        """The right answer, parsed; `UserError` where it is no mathematics."""
        answer = right_answer(prompt)
        gold = self._parse_answer(answer)
        if not gold:
            raise UserError(
                f"the answer {answer[:60]!r} of prompt {prompt.text[:60]!r} is no mathematics; "
                'use reward.kind = "exact"'
            )
        return gold

    def _parse_answer_anew(self, answer: str) -> list[Any]:
        """The right answer: bare (42, 1/2, \\frac{1}{2}, \\$18.90) or in a text with $...$ or \\boxed{...}."""
        dressed = answer if DOLLAR.search(answer) or "\\boxed" in answer else f"${answer}$"
        return self._library.parse(dressed, parsing_timeout=None)
