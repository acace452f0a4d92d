"""The named scorers give the verdicts of the programs that they are named after.

scorers.jsonl has answers of five suites, for each another writing and a wrong answer, and what the originals said of
the five responses below: 1 for right. verl 0.7.0: math_dapo and prime_math; Qwen2.5-Math: parser and grader of its
evaluation, with the suite "math".
"""

import pytest

from megarl.rewards.answers import COMPARED, answer_of
from megarl.rewards.dapo import normalised
from tests.extent import EVERY
from tests.rewards.pooling import prompt_for, rows_of, scorer

ROWS = rows_of("scorers.jsonl")
WRITINGS = (
    "So we get $\\boxed{GOLD}$.",
    "Therefore\nAnswer: GOLD",
    "Answer: $\\boxed{GOLD}$",
    "It follows that the answer is $OTHER$.",
    "The answer is \\boxed{WRONG}\nAnswer: WRONG",
)


@pytest.mark.parametrize("kind", ["dapo", "prime_math", "qwen_math"])
def test_a_named_scorer_agrees_with_its_original(kind):
    """Every third row, and all of them under `EVERY`."""
    verifier, differences = scorer(kind), []
    assert len(ROWS) >= 300
    rows = ROWS if EVERY else ROWS[::3]
    for row in rows:
        for writing, verdict in zip(WRITINGS, row[kind], strict=True):
            response = writing.replace("GOLD", row["gold"]).replace("OTHER", row["other"])
            response = response.replace("WRONG", row["wrong"])
            if verifier.score(prompt_for(row["gold"]), response) != float(verdict):
                differences.append((row["gold"], response, verdict))
    assert len(differences) <= 0.01 * len(rows) * len(WRITINGS), differences


def test_prime_math_compares_long_formulas_as_text():
    long = "+".join(f"x_{{{number}}}" for number in range(300))
    assert scorer("prime_math").score(prompt_for(long), f"\\boxed{{{long}}}") == 1
    assert scorer("prime_math").score(prompt_for(long), f"\\boxed{{{long}+1}}") == 0


@pytest.mark.parametrize(
    ("gold", "response", "right"),
    [
        ("42", "ANSWER :\n\n42", True),
        ("42", "Answer: 41\nwait\nAnswer: 42\nas claimed", True),
        ("\\sqrt{2}", "Answer: $\\sqrt2$", True),
        ("42", "Answer: 42.", False),
        ("42", "Answer: 42" + " " * 300, False),
        ("0.5", "Answer: 1/2", False),
    ],
)
def test_dapo_compares_what_follows_the_last_answer_as_text(gold, response, right):
    assert scorer("dapo").score(prompt_for(gold), response) == float(right)
    assert (answer_of("dapo", response) == normalised(gold)) == right


@pytest.mark.parametrize("kind", ["prime_math", "qwen_math"])
def test_the_answers_of_responses_can_be_counted_for_majorities(kind):
    assert kind in COMPARED
    assert answer_of(kind, "so it is \\boxed{\\dfrac12}") == answer_of(kind, "the answer is \\boxed{1/2}") is not None
    assert answer_of(kind, "") is None
