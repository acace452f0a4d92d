"""The verifier for exact answers: response and answer must be equal, except for white space around them."""

from __future__ import annotations

from megarl.data.prompts import Prompt, PromptSource
from megarl.recipe.tables import Recipe, RewardTable
from megarl.rewards import Verifier, check_rows, right_answer


def check(recipe: Recipe) -> None:
    """Raise `UserError` if a row of a prompt file has no answer. Items of generators are checked when scored."""
    check_rows(recipe, right_answer)


def build(table: RewardTable, prompts: PromptSource) -> Verifier:
    """See `VerifierModule`."""
    return Exact()


class Exact:
    """Scores 1 or 0."""

    def score(self, prompt: Prompt, response: str) -> float:
        return float(response.strip() == right_answer(prompt).strip())
