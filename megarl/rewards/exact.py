"""The response must equal the answer, letter by letter; white space around either does not count."""

from __future__ import annotations

from megarl.data.prompts import Prompt, PromptSource
from megarl.recipe.tables import Recipe, RewardTable
from megarl.rewards import Verifier, right_answer


def check(recipe: Recipe) -> None:
    """Suits all data; a prompt without an answer is a `UserError` when a response to it is scored."""


def build(table: RewardTable, prompts: PromptSource) -> Verifier:
    """See `VerifierModule`."""
    return Exact()


class Exact:
    """Scores 1 or 0."""

    def score(self, prompt: Prompt, response: str) -> float:
        return float(response.strip() == right_answer(prompt).strip())
