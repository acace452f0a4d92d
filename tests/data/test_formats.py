"""Prompt files in the published formats of public data sets, and files whose columns the recipe maps."""

import base64
import json
import pickle
import zlib

import pytest

from megarl.data.formats import FORMATS, SKYWORK_AFTER
from megarl.data.prompts import Prompt
from megarl.data.sources import open_items
from megarl.errors import UserError
from megarl.recipe.data_table import SourceTable
from megarl.rewards.code import read_tests
from tests.data.prompt_sources import read, write
from tests.helpers import ROOT
from tests.rewards.pooling import scorer


def chat(text):
    return [{"content": text, "role": "user"}]


SQUARE = "What is $3^2$?"
DAPO = {
    "data_source": "math_dapo",
    "prompt": chat('Solve it. What is $3^2$?\n\nRemember to put your answer on its own line after "Answer:".'),
    "reward_model": {"ground_truth": "9", "style": "rule-lighteval/MATH_v2"},
}
SKYWORK = {
    "data_source": "train-math-deepscaler",
    "prompt": chat(SQUARE),
    "reward_model": {"ground_truth": '["9", "9.0"]', "style": "rule"},
}
SKYWORK_EXAM = {"prompt": chat(SQUARE + SKYWORK_AFTER), "reward_model": {"ground_truth": "9"}}
BOXES = r"First \boxed{3}, so it is $\boxed{\frac{18}{2}}$."
MATH = {"problem": SQUARE, "level": "Level 1", "type": "Algebra", "solution": BOXES}
MATH500 = {"problem": SQUARE, "solution": "", "answer": "9", "subject": "Algebra", "level": 1}
GSM8K = {"question": SQUARE, "answer": "Three threes are 3*3=<<3*3=9>>9.\nIn cents 900.\n#### 1,009"}
KEPT = {"source": "orca_math", "domain": ["Mathematics -> Algebra"], "llama8b_solve_rate": 0.875}
HOT = {"id": "Mercury_1", "question": "Which is hot?", "answerKey": "2"}
HOT |= {"choices": {"text": ["ice", "fire", "air"], "label": ["1", "2", "3"]}}
GRIDS = [{"input": [[0, 1], [2, 3]], "output": [[1]]}, {"input": [[4]], "output": [[5, 6], [7, 8]]}]
GRID = "Input:\n0 1\n2 3\n\nOutput:"
SUDOKU = {"answer": [[1, 2], [2, 1]], "difficulty": "easy"}
PUZZLE = {"id": "1", "task_name": "sudoku", "prompt": SQUARE, "answer": "", "meta": json.dumps(SUDOKU)}


@pytest.mark.parametrize(
    ("name", "suffix", "row", "question", "answer", "columns"),
    [
        ("dapo_math", "parquet", DAPO, DAPO["prompt"][0]["content"], "9", {}),  # its instructions stay
        ("deepscaler", "json", {"problem": SQUARE, "answer": "9", "solution": "Three."}, SQUARE, "9", {}),
        ("skywork_or1", "parquet", SKYWORK, SQUARE, "9", {"also_right": ["9.0"]}),
        ("skywork_or1", "parquet", SKYWORK_EXAM, SQUARE, "9", {}),
        ("math", "parquet", MATH, SQUARE, r"\frac{18}{2}", {"level": "Level 1", "subject": "Algebra"}),
        ("math", "jsonl", MATH500, SQUARE, "9", {"level": 1, "subject": "Algebra"}),
        ("gsm8k", "jsonl", GSM8K, SQUARE, "1009", {}),
        ("big_math", "parquet", {"problem": SQUARE, "answer": "9"} | KEPT, SQUARE, "9", KEPT),
        ("arc", "parquet", HOT, "Which is hot?\n\nA. ice\nB. fire\nC. air", "B", {}),
        (
            *("arc_agi", "json", {"train": GRIDS[:1], "test": GRIDS}),
            *(f"{GRID}\n1\n\n{GRID}\n\nInput:\n4\n\nOutput:", "1\n\n5 6\n7 8", {}),
        ),
        ("enigmata", "parquet", PUZZLE, SQUARE, "[[1, 2], [2, 1]]", {"task_name": "sudoku", "meta": SUDOKU}),
        ("enigmata", "jsonl", PUZZLE | {"answer": "42", "meta": ""}, SQUARE, "42", {"task_name": "sudoku", "meta": {}}),
    ],
)
def test_questions_and_answers(tmp_path, name, suffix, row, question, answer, columns):
    (item,) = read(tmp_path / f"p.{suffix}", [row], format=name)
    assert item == {"question": question, "answer": answer, "metadata": columns}


@pytest.mark.parametrize("kind", ["math", "dapo"])
def test_any_answer_of_a_list_is_right(tmp_path, kind):
    row = SKYWORK | {"reward_model": {"ground_truth": '["(3,4)", "7"]', "style": "rule"}}
    (item,) = read(tmp_path / "p.parquet", [row], format="skywork_or1")
    writing = {"dapo": "Answer: %s", "math": "\\boxed{%s}"}[kind]
    found = [scorer(kind).score(as_prompt(item), writing % answer) for answer in ("7", "(3,4)", "3", "(4,3)")]
    assert found == [1.0, 1.0, 0.0, 0.0]


def test_rows_that_a_file_repeats_are_trained_once_an_epoch(tmp_path):
    """DAPO-Math-17k as published has each question about 100 times."""
    rows = [{"problem": f"What is {n}?", "answer": str(n), "source": "x"} for n in (1, 2, 3)] * 100
    table = SourceTable(source="file", train=str(write(tmp_path / "p.parquet", rows)), format="deepscaler")
    with pytest.warns(UserWarning, match="repeats 297 of its 300 rows"):
        items = open_items(table)
    for epoch in range(4):
        assert {items.train(0, 3 * epoch + n, 0)["answer"] for n in range(3)} == {"1", "2", "3"}


def as_prompt(item):
    return Prompt(0, str(item["question"]), (), item["answer"], item)


CONTEST = {
    "name": "1_A. Sum",
    "description": "Read two numbers, write their sum.",
    "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
    "private_tests": {"input": ["5 5\n", "0 0\n"], "output": ["10\n", "0\n"]},
    "generated_tests": {"input": [], "output": []},
    "difficulty": 7,
    "solutions": {"language": [3], "solution": ["print(sum(map(int, input().split())))"]},
}


def live_code_bench(public, private, **more):
    tests = {"public_test_cases": json.dumps(public), "private_test_cases": private}
    return {"question_content": "Add.", "starter_code": "", "metadata": "{}", "difficulty": "easy", **tests, **more}


def packed(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


FIRST, SECOND = ({"input": f"{n} 2", "output": f"{n + 2}", "testtype": "stdin"} for n in (1, 5))
CALLED = [{"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}]
STARTER = "class Solution:\n    def add(self, a, b):"
FUNCTIONAL = live_code_bench(CALLED, "[]", starter_code=STARTER, metadata='{"func_name": "add"}')
CHECK = "def check(candidate):\n    assert candidate(1) == 2"
TRUTHS = (
    {"inputs": ["1 2"], "outputs": ["3"], "test_code": None, "fn_name": None},
    {"entry_point": "add", "import_prefix": "import math\n", "test_code": CHECK},
)
SKYWORK_CODE = [SKYWORK | {"reward_model": {"ground_truth": json.dumps(truth)}} for truth in TRUTHS]


@pytest.mark.parametrize(
    ("name", "row", "question", "pairs", "assertions"),
    [
        (
            *("code_contests", CONTEST, CONTEST["description"]),
            *((("1 2\n", "3\n"), ("5 5\n", "10\n"), ("0 0\n", "0\n")), ""),
        ),
        (
            *("livecodebench", live_code_bench([FIRST], packed(json.dumps([SECOND]))), "Add."),
            *((("1 2", "3"), ("5 2", "7")), ""),
        ),
        (
            *("livecodebench", FUNCTIONAL, f"Add.\n\n```python\n{STARTER}\n```"),
            *((), "\nassert __same_list__(add(*[[1, 2], 3]), 6)"),
        ),
        ("skywork_or1", SKYWORK_CODE[0], SQUARE, (("1 2", "3"),), ""),
        ("skywork_or1", SKYWORK_CODE[1], SQUARE, (), f"import math\n\n{CHECK}\ncheck(add)\n"),
    ],
)
def test_questions_with_programs_as_answers(tmp_path, name, row, question, pairs, assertions):
    (item,) = read(tmp_path / "p.parquet", [row], format=name)
    assert (item["question"], item["answer"], "solutions" in item["metadata"]) == (question, "", False)
    tests = read_tests(as_prompt(item), "python")
    assert (tests.pairs, tests.assertions) == (pairs, assertions)


class Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('it was executed')",))


def test_a_pickle_is_never_executed(tmp_path):
    with pytest.raises(UserError, match=r"p\.jsonl, line 1 is not a row of data\.format = 'livecodebench'"):
        read(tmp_path / "p.jsonl", [live_code_bench([], packed(Bomb()))], format="livecodebench")


COMPARES = (ROOT / "tests/rewards/data/evalplus.txt").read_text()  # how EvalPlus's tests begin
LOOP = "for i, (inp, exp) in enumerate(zip(inputs, results)):\n"


def test_evalplus(tmp_path):
    """The verdicts of its tests: tests/rewards/test_publishers.py."""
    human = {"task_id": "HumanEval/0", "prompt": "def halves(x):\n", "entry_point": "halves", "test": COMPARES}
    mbpp = {"task_id": 2, "prompt": "Halve it.", "test_list": ["assert halves(2)", "no"], "test": COMPARES}
    stubbed, told = read(tmp_path / "p.jsonl", [human, mbpp], format="evalplus")
    assert (stubbed["question"], stubbed["metadata"]["entry_point"]) == ("def halves(x):\n", "halves")
    assert told["question"] == "Halve it.\n\nassert halves(2)"


def test_gpqa(tmp_path):
    wrong = {f"Incorrect Answer {n}": choice for n, choice in enumerate(("x", "y", "z, or\nw"), 1)}
    right = [{"Question": f"Which is number {n}?\n", "Correct Answer": f"the {n}th\n"} for n in range(40)]
    rows = [row | wrong | {"Subdomain": "Physics"} for row in right]
    items = read(tmp_path / "gpqa_diamond.csv", rows, format="gpqa")
    assert items == read(tmp_path / "again.csv", rows, format="gpqa"), "the order of choices depends on the question"
    for n, item in enumerate(items):
        assert item["question"].startswith(f"Which is number {n}?\n\nA. ")
        assert f"\n{item['answer']}. the {n}th" in item["question"]
        assert all(f". {choice}" in item["question"] for choice in ("x", "y", "z, or\nw"))
        assert item["metadata"] == {"subdomain": "Physics"}
    assert {item["answer"] for item in items} == set("ABCD")


def test_columns_are_found_where_the_recipe_says(tmp_path):
    row = {"ask": chat(SQUARE), "truth": {"all": ["9", "nine"]}, "io.tests": "[]", "level": 3}
    columns = {"prompt": "ask.0.content", "answer": "truth.all.0", "tests": "io.tests"}
    for suffix in ("parquet", "jsonl", "json"):
        (item,) = read(tmp_path / f"p.{suffix}", [row], columns=columns)
        assert (item["question"], item["answer"]) == (SQUARE, "9")
        assert item["metadata"]["level"] == 3 and item["metadata"]["tests"] == "[]"
        assert item["metadata"]["io.tests"] == "[]"  # a column keeps its own name, too
    renamed = read(tmp_path / "p.csv", [{"q": "1+1", "a": "2", "x": "y"}], columns={"prompt": "q", "answer": "a"})
    assert renamed == [{"question": "1+1", "answer": "2", "metadata": {"q": "1+1", "a": "2", "x": "y"}}]
    for path in ("truth.none", "truth.all.7", "truth.all.first"):
        with pytest.raises(UserError, match=rf"p\.jsonl, line 1: no column '{path}'; it has ask, truth, io"):
            read(tmp_path / "p.jsonl", [row], columns={"prompt": "ask", "answer": path})


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_of_another_format_is_an_error(tmp_path, name):
    with pytest.raises(UserError, match=rf"line 1: no column .*, which data.format = '{name}' needs"):
        read(tmp_path / "p.jsonl", [{"text": "1"}], format=name)
