"""Programs get what a benchmark's grader gives them, and its verdicts.

harness_outputs.jsonl has outputs of programs with those that were expected, and harness_programs.jsonl programs with
their tests, both made up, with the verdicts of the publishers: LiveCodeBench, lcb_runner/evaluation/testing_util.py at
28fef95e, and code_contests, `OutputsMatch` of execution/tester_sandboxer.cc at fa7a4f81, compiled with strtod in place
of absl's. What differs is listed here with its reason.
"""

import itertools
import re

import pytest

from megarl.rewards.harness import HARNESSES
from tests.rewards.pooling import prompt_for, rows_of, scorer

OUTPUTS, PROGRAMS = rows_of("harness_outputs.jsonl"), rows_of("harness_programs.jsonl")
# what the grader of code_contests decides otherwise
UNCERTAIN = re.compile(
    r"\b(?:nan|inf)\b"  # beside which it takes equal numbers of different form for unequal
    r"|\d{17}"  # integers that are equal only as doubles, which it takes for equal
    r"|[.\d]0*1\b|[.\d]9+\b|\d5\b"  # differences of 1e-5, on which rounding decides there
)
# programs that LiveCodeBench refuses because it runs them inside a function of its own process, all tests in one
# instance, or with Python's limit on the digits of a number; and numpy, which the sandbox does not have
OURS_PASS = re.compile(
    r"self\.n-1|Missing|open\(0\)|in sys\.stdin|quit\(\)|\nx=1$|global n|__future__|_exit|10\*\*5000"
)


def score(tests, program, **columns):
    return scorer("code").score(prompt_for(tests=tests, **columns), f"```python\n{program}\n```").value


@pytest.mark.parametrize("name", ["livecodebench", "code_contests"])
def test_outputs_are_compared_as_the_publisher_does(name):
    differ = [each for each in OUTPUTS if HARNESSES[name].agrees(each["found"], each["expected"]) != each[name]]
    assert len(OUTPUTS) >= 600
    if name == "livecodebench":
        assert differ == []
    assert len(differ) <= 0.08 * len(OUTPUTS)
    assert [each for each in differ if not UNCERTAIN.search(each["found"] + " " + each["expected"])] == []


def test_programs_get_the_verdicts_of_livecodebench():
    """Every tenth of the programs."""
    for each in PROGRAMS[::10]:
        program = each["program"]
        tests = {key: each[key] for key in ("inputs", "outputs", "fn_name")} | {"harness": "livecodebench"}
        expected = (each["livecodebench"] or bool(OURS_PASS.search(program))) and "import numpy" not in program
        assert score(tests, program) == expected, program


def test_a_function_may_have_the_name_of_a_builtin_or_a_module():
    for name, harness in itertools.product(("sum", "copy"), (None, "livecodebench")):
        tests = {"inputs": [[5, 2]], "outputs": [3], "fn_name": name, "harness": harness}
        assert score(tests, f"def {name}(a, b): return a - b") == 1, (name, harness)
        assert score(tests, f"class Solution:\n    def {name}(self, a, b): return a - b") == 1, (name, harness)


def test_a_rows_preamble_runs_before_the_program():
    check = "def check(candidate):\n    assert candidate([1]) == 1"
    program = "def f(a: List[int]) -> int:\n    return reduce(add, a)"
    columns = {"entry_point": "f", "preamble": "from functools import *\nfrom operator import *\nfrom typing import *"}
    assert score(check, program, **columns) == 1
    assert score(check, program, entry_point="f") == 0
    assert score([{"input": "4", "output": "2"}], "print(int(sqrt(int(input()))))", preamble="from math import *") == 1
