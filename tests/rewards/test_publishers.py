"""The verdicts of the publishers' own graders on answers in their formats, beside ours.

A file of data/ begins with a comment that names the grader. Its other lines are lists: the reference answer, a
response, the publisher's verdict, and the key of `REASONS` where ours is the other one.
"""

import json

import pytest

from megarl.data.formats import enigmata, evalplus, skywork_or1
from tests.data.test_formats import COMPARES, LOOP
from tests.extent import EVERY
from tests.rewards.pooling import prompt_for, rows_of, scorer

REASONS = {
    "value": "it compares texts, or values of few forms; megarl compares values",
    "box": "it reads \\boxed{...} only; megarl all forms of a box, or an answer without one",
    "layout": "a dot, a dollar sign, bold or a unit beside the answer is part of its answer",
    "digits": "it drops white space, so that 4 2 is 42",
    "braces": "it drops braces, so that 2^{n}-1 is 2^{n-1}",
    "brackets": "megarl takes (5,-3) and [5,-3], which is no interval, for one point",
    "case": "math-verify, which megarl uses, reads R as r",
    "marker": "it reads only what follows '#### ', as a text; megarl also other writings",
    "first": "it reads the first answer that it finds, also in thoughts; megarl the last",
    "line": "it takes the last line of a response without a box; megarl a formula or a number",
    "bare": "it reads \\boxed x = 4 to the end of the formula; megarl to the first blank",
    "mixed": "it multiplies 7 and 1/2 in 7\\frac{1}{2}",
    "percent": "it takes 20 % for none of 20, 20\\% and 0.2, unless written as its parser expects",
    "interval": "it reads x > 2 as no interval",
    "rounded": "it rounds numbers to six places, and takes all below 1e-15 for 0",
    "sets": "it takes a set or a list for a tuple, or for its only element",
    "base": "it drops the base of a number",
    "written": "it reads some writings of a choice's label only, such as Answer: C or (C)",
    "small": "it takes (c) for no label",
    "several": "it takes the first of two choices; for megarl a response with two has none",
    "letters": "it takes the first letter of a word",
    "not": "it takes the label after 'The answer is not'",
    "rows": "it reads JSON only, megarl also rows of numbers and numpy's lists",
    "nested": "it takes a list of one grid for no grid, or JSON in which the grid is a part",
    "bracket": "it reads what the last bracket closes, whatever it is",
    "floats": "it takes 1.0 for 1",
    "thoughts": "it asks for one </think>; megarl needs none, and reads what follows the last",
}

OF_PROGRAMS = {
    "type": "it asks for a list where a list of floats is expected; the tests that it publishes do not",
    "objects": "what a function returns must be of a class of Python itself, not one derived from it or another",
    "numpy": "the sandbox has no numpy",
    "method": "megarl also finds the function as a method of a class Solution",
    "typing": "the names of typing need no import in megarl",
    "guard": "it takes away input(), os.getcwd() and writing files; the sandbox has them, in a folder of its own",
}


MATHEMATICS = ("math", "gsm8k", "deepscaler", "big_math", "skywork_or1", "math_verify")


@pytest.mark.parametrize("name", [*MATHEMATICS, "gpqa", "gpqa_simple_evals", "arc", "arc_agi"])
def test_the_verdicts_are_the_publishers_but_for_the_listed_ones(name):
    """All rows with a reason, and every third of the others; all of them under `EVERY`."""
    rows, verifier = rows_of(f"data/{name}.jsonl"), scorer("math")
    assert len(rows) >= 300
    assert {reason for *_, reason in (row[3:] for row in rows if row[3:])} <= REASONS.keys()
    rows = [row for n, row in enumerate(rows) if EVERY or row[3:] or n % 3 == 0]
    ours = [verifier.score(prompt_of(gold, name), response) for gold, response, *_ in rows]
    expected = [float(bool(row[2]) != bool(row[3:])) for row in rows]
    assert [row for row, found, right in zip(rows, ours, expected, strict=True) if found != right] == []


def prompt_of(gold, name):
    row = {"answer": gold}
    if name == "skywork_or1":  # a list of answers, any of which is right
        row = skywork_or1({"prompt": [{"role": "user", "content": "?"}], "reward_model": {"ground_truth": gold}})
    return prompt_for(**row)


def test_programs_get_the_verdicts_of_evalplus_but_for_the_listed_ones():
    """Those with a reason, and every twelfth of the others."""
    rows, verifier, wrong = rows_of("data/evalplus.jsonl"), scorer("code"), []
    assert len(rows) >= 300
    assert {row[5] for row in rows if row[5:]} == OF_PROGRAMS.keys()
    for kind, inputs, results, program, right, *reason in [row for n, row in enumerate(rows) if row[5:] or n % 12 == 0]:
        if kind == "humaneval":
            tests = f"{COMPARES}\ndef check(candidate):\n    inputs = {inputs}\n    results = {results}\n"
            tests += f"    {LOOP}        assertion(candidate(*inp), exp, 0)\n"
        else:
            tests = f"{COMPARES}\ninputs = {inputs}\nresults = {results}\n{LOOP}    assertion(f(*inp), exp, 0)\n"
        row = evalplus({"prompt": "?", "test": tests, "entry_point": "f" if kind == "humaneval" else None})
        score = verifier.score(prompt_for(**row), f"```python\n{program}\n```").value
        if score != float(bool(right) != bool(reason)):
            wrong.append((program, reason, score))
    assert wrong == []


def test_enigmatas_verifiers_get_what_they_get_of_published_rows():
    """They read an answer and a meta as JSON where they can, so the verdicts on 330 responses are theirs: the answer in
    a fence, as JSON, without a fence, another one, and another one before it. 79 are right."""
    rows = rows_of("data/enigmata.jsonl")
    assert sum(len(verdicts) for *_, verdicts in rows) >= 300
    for task, answer, meta, _ in rows:
        row = enigmata({"prompt": "?", "task_name": task, "answer": answer, "meta": meta})
        assert (row["task_name"], as_json(row["answer"]), row["meta"]) == (task, as_json(answer), as_json(meta))


def as_json(value):
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
