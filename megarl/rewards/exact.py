"""The response must equal the answer, letter by letter; white space around either does not count."""

from __future__ import annotations

from megarl.data.prompts import Prompt, PromptSource
from megarl.recipe.tables import Recipe, RewardTable
from megarl.rewards import Verifier, check_rows, right_answer


def check(recipe: Recipe) -> None:
    """Every row of a prompt file must have an answer; a generator's item without is a `UserError` when it is met."""
    check_rows(recipe, right_answer)


def build(table: RewardTable, prompts: PromptSource) -> Verifier:
    """See `VerifierModule`."""
    return Exact()


class Exact:
    """Scores 1 or 0."""

    def score(self, prompt: Prompt, response: str) -> float:
        return float(response.strip() == right_answer(prompt).strip())
