"""Mathematical equality of the final answers, decided by math-verify.

A hostile formula can cost SymPy hours or all memory, and math-verify's own time limit works only in the main thread and
between two bytecodes: so it is told to keep none, and `megarl.rewards.pool` ends what takes too long.
"""

from __future__ import annotations

import functools
from typing import Any

from megarl.data.prompts import Prompt, PromptSource
from megarl.errors import UserError
from megarl.recipe.tables import Recipe, RewardTable
from megarl.rewards import Verifier, right_answer


def check(recipe: Recipe) -> None:
    """Suits all data; an answer that is no mathematics is a `UserError` when a response to it is scored."""


def build(table: RewardTable, prompts: PromptSource) -> Verifier:
    """See `VerifierModule`."""
    return Math()


class Math:
    """Scores 1 or 0."""

    def __init__(self) -> None:
        import math_verify  # a second, which only the process that scores has to wait for

        self._library = math_verify
        self._parse_answer = functools.lru_cache(1024)(self._parse_answer_anew)

    def score(self, prompt: Prompt, response: str) -> float:
        answer = right_answer(prompt)
        gold = self._parse_answer(answer)
        if not gold:
            raise UserError(
                f"the answer {answer[:60]!r} of prompt {prompt.text[:60]!r} is no mathematics; "
                'use reward.kind = "exact"'
            )
        try:
            found = self._library.parse(response, parsing_timeout=None)
            return float(self._library.verify(gold, found, timeout_seconds=None))
        except MemoryError:
            raise
        except Exception:  # whatever SymPy raises on what it cannot read or compare: it is wrong
            return 0.0

    def _parse_answer_anew(self, answer: str) -> list[Any]:
        """The right answer: bare (42, 1/2, \\frac{1}{2}) or in a text with $...$ or \\boxed{...}."""
        dressed = answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
        return self._library.parse(dressed, parsing_timeout=None)
