"""The verifier for mathematics agrees with verdicts made by hand (judged_pairs.jsonl)."""

import json
import tracemalloc
from pathlib import Path

import pytest

from megarl.data.boxes import joined_boxes, last_box
from megarl.recipe.tables import RewardTable
from megarl.rewards.answers import answer_of
from megarl.rewards.math import Math
from tests.rewards.pooling import prompt_for

PAIRS = [json.loads(line) for line in Path(__file__).with_name("judged_pairs.jsonl").read_text().splitlines()]


VERIFIER = Math(RewardTable(kind="math"))


def score(gold, response):
    return VERIFIER.score(prompt_for(gold), response)


def test_the_verdicts_are_those_of_a_person():
    wrong = [pair for pair in PAIRS if score(pair["gold"], pair["response"]) != float(pair["right"])]
    assert len(PAIRS) >= 300 and wrong == []


ANSWERS = ("-3", "42", "\\frac{7}{2}", "0.25", "x^2+1", "3\\sqrt{2}", "(1,2)", "[0,1)", "\\{1,2\\}", "2\\pi", "4.5e33")
BOXED = ("\\boxed{%s}", "\\boxed{%s.}", "\\boxed{\\text{The answer is } %s}", "$\\boxed %s$", " \\boxed{ %s } ")
HARMLESS = ("\\boxed{\\textcolor{red}{%s}}", "\\boxed{\\color{blue}%s}", "<think>\\boxed{no}</think>$\\boxed{%s}$")
HARMLESS += (
    "<answer>$%s$</answer>",
    "The answer is **\\boxed{%s}**.",
    "<think>so</think>\n<answer>\\boxed{%s}</answer>",
)


@pytest.mark.parametrize("gold", ANSWERS)
def test_harmless_text_around_an_answer_changes_no_verdict(gold):
    boxed = Math(RewardTable(kind="math", boxed=True))
    for writing in BOXED:
        response = writing.replace("%s", gold)
        assert boxed.score(prompt_for(gold), response) == 1.0
        assert answer_of("math", response) == answer_of("math", f"\\boxed{{{gold}}}")
    for writing in HARMLESS:
        assert [other for other in ANSWERS if score(gold, writing.replace("%s", other))] == [gold]


def test_responses_with_a_label_are_counted_for_majorities():
    assert answer_of("math", "It has 4 wheels, so the answer is (C).") == answer_of("math", "\\boxed{C}") == "C"
    assert answer_of("math", "<think>Maybe the answer is (B)</think> The answer is C(10,3) = 120") == "120"


def test_boxes_in_boxes_take_neither_time_nor_memory():
    tracemalloc.start()
    assert last_box("\\boxed{" * 50_000) is None  # hours, if each were read to the end
    assert last_box("\\boxed{" * 50_000 + "1" + "}" * 50_000) == "1"  # 10 GB, if each were a text of its own
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()
    assert joined_boxes("\\boxed{1}, $\\boxed 2$ and \\boxed{\\frac{1}{\\boxed{3}}}") == "1, 2, \\frac{1}{\\boxed{3}}"
