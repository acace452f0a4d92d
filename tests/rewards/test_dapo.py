"""The scorer of DAPO's experiments reads "Answer:" and compares normalised texts."""

import pytest

from megarl.data.prompts import Prompt
from megarl.recipe.tables import RewardTable
from megarl.rewards.answers import answer_of
from megarl.rewards.dapo import build, normalised


@pytest.mark.parametrize(
    ("gold", "response", "right"),
    [
        ("42", "so\nAnswer: 42", True),
        ("42", "ANSWER :\n\n42", True),
        ("42", "Answer: $42$.", True),
        ("42", "Answer: \\boxed{42}", True),
        ("42", "Answer: 41\nwait\nAnswer: 42\nas claimed", True),
        ("42", "Answer: x = 42 dollars", True),
        ("1234", "Answer: 1,234", True),
        ("\\frac{1}{2}", "Answer: \\frac12", True),
        ("\\sqrt{2}", "Answer: $\\sqrt2$", True),
        ("42", "\\boxed{42}", False),
        ("42", "the answer is 42", False),
        ("42", "Answer: 42.", False),
        ("42", "Answer: 42" + " " * 300, False),
        ("0.5", "Answer: 1/2", False),
    ],
)
def test_what_follows_the_last_answer_is_compared_as_text(gold, response, right):
    assert build(RewardTable(kind="dapo"), None).score(Prompt(0, "?", (1,), gold, {}), response) == float(right)
    assert (answer_of("dapo", response) == normalised(gold)) == right
