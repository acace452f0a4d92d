"""The verifier for mathematics agrees with verdicts made by hand (judged_pairs.jsonl)."""

import json
from pathlib import Path

import pytest

from megarl.data.prompts import Prompt
from megarl.recipe.tables import RewardTable
from megarl.rewards.answers import answer_of
from megarl.rewards.math import Math

PAIRS = [json.loads(line) for line in Path(__file__).with_name("judged_pairs.jsonl").read_text().splitlines()]
DIFFERENT = [("\\frac{1}{3}", "\\boxed{0.\\overline{3}}")]  # right, but a repeating decimal is not read


@pytest.fixture(scope="module")
def verdicts():
    verifier = Math(RewardTable(kind="math"))
    return [bool(verifier.score(Prompt(0, "?", (1,), pair["gold"], {}), pair["response"])) for pair in PAIRS]


def test_the_verdicts_are_those_of_a_person(verdicts):
    wrong = [pair for pair, verdict in zip(PAIRS, verdicts, strict=True) if verdict != pair["right"]]
    assert len(PAIRS) >= 150
    assert len(wrong) <= 0.03 * len(PAIRS), wrong
    assert [(pair["gold"], pair["response"]) for pair in wrong] == DIFFERENT


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("1/3", ".3333333"),
        ("(1,2)", "\\boxed{1,2}"),
        ("3", "\\boxed{\\{3\\}}"),
        ("42", "\\boxed{[42]}"),
        ("42", "$[42]$"),
        ("1.6\\times10^{-19}", "\\boxed{1.7\\times10^{-19}}"),
    ],
)
def test_math_verify_alone_would_take_these_for_equal(gold, response):
    import math_verify

    parse = math_verify.parse
    assert math_verify.verify(parse(f"${gold}$"), parse(response))
    assert Math(RewardTable(kind="math")).score(Prompt(0, "?", (1,), gold, {}), response) == 0.0


@pytest.mark.parametrize(
    "writing", ["\\boxed{%s}", "\\boxed{%s.}", "\\boxed{\\text{The answer is } %s}", "$\\boxed %s$"]
)
@pytest.mark.parametrize("gold", ["42", "9.5", "\\frac{1}{2}", "3\\sqrt{2}", "(1,2)", "[0,1)", "x^2+1", "4.5e33"])
def test_a_dot_or_words_in_the_box_do_not_count(gold, writing):
    boxed = Math(RewardTable(kind="math", boxed=True))
    response = writing.replace("%s", gold)
    assert boxed.score(Prompt(0, "?", (1,), gold, {}), response) == 1.0
    assert answer_of("math", response) == answer_of("math", f"\\boxed{{{gold}}}")
