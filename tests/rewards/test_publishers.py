"""The verdicts of the publishers' own graders on answers in their formats, beside ours.

A file of data/ begins with a comment that names the grader. Its other lines are lists: the reference answer, a
response, the publisher's verdict, and the key of `REASONS` where ours is the other one.
"""

import json
from pathlib import Path

import pytest

from megarl.data.prompts import Prompt
from megarl.recipe.tables import RewardTable
from megarl.rewards.math import Math

REASONS = {
    "value": "it compares texts, or values of few forms; megarl compares values",
    "box": "it reads an answer from \\boxed{...} only; megarl from all forms of a box, or without one",
    "layout": "a dot, a dollar sign, bold or a unit beside the answer is part of its answer; for megarl it is none",
    "digits": "it drops white space, so that 4 2 is 42",
    "braces": "it drops braces, so that 2^{n}-1 is 2^{n-1}",
    "brackets": "megarl takes (5,-3) and [5,-3], which is no interval, for the same point",
    "case": "math-verify, which megarl uses, reads R as r",
    "marker": "it reads what follows '#### ' only, and that as a text; megarl also other writings, or a box",
    "first": "it reads the first ####, megarl the last",
    "line": "it takes the last line of a response without a box, whatever stands there; megarl a formula or a number",
    "bare": "it reads \\boxed x = 4 to the end of the formula; megarl to the first blank",
    "mixed": "it multiplies 7 and 1/2 in 7\\frac{1}{2}",
    "percent": "it takes 20 % for none of 20, 20\\% and 0.2 that are written otherwise than its parser expects",
    "interval": "it reads x > 2 as no interval",
    "rounded": "it rounds numbers to six places, and takes all below 1e-15 for 0",
    "sets": "it takes a set or a list for a tuple, or for its only element",
    "base": "it drops the base of a number",
    "thoughts": "it asks for one </think>; megarl needs none, and reads what follows the last",
}


def rows_of(name):
    lines = Path(__file__).with_name("data").joinpath(f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("name", ["math", "gsm8k", "deepscaler", "big_math", "math_verify"])
def test_the_verdicts_are_the_publishers_but_for_the_listed_ones(name):
    rows, verifier = rows_of(name), Math(RewardTable(kind="math"))
    assert len(rows) >= 300
    assert {reason for *_, reason in (row[3:] for row in rows if row[3:])} <= REASONS.keys()
    ours = [verifier.score(Prompt(0, "?", (1,), gold, {}), response) for gold, response, *_ in rows]
    expected = [float(bool(row[2]) != bool(row[3:])) for row in rows]
    assert [row for row, found, right in zip(rows, ours, expected, strict=True) if found != right] == []
