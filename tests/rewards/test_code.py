"""Which part of a response is the program, which tests a row has, which programs are right."""

import json
from dataclasses import replace

import pytest

from megarl.data.prompts import Prompt
from megarl.errors import UserError
from megarl.recipe.tables import RewardTable
from megarl.rewards import code, cpp
from megarl.rewards.code import Code, is_right, program_of, read_tests
from megarl.rewards.parts import check_reward
from megarl.rewards.sandbox import Outcome
from tests.data.prompt_sources import recipe, write
from tests.rewards.pooling import prompt_for

SUM = "int main() { int a, b; std::cin >> a >> b; std::cout << a + b; }"
ADD = "```python\nprint(sum(map(int, input().split())))\n```"


def score(prompt, response, **settings):
    return Code(RewardTable(kind="code", **settings)).score(prompt, response).value


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("print(1)", "print(1)"),
        ("so:\n```python\nprint(1)\n```\nor rather\n```\nprint(2)\n```\nThat is it.", "print(2)\n"),
        ("```py\nprint(1)\n```\n```cut\nprint(2)", "print(2)"),
        ("```python\nprint(1)\nprint(2)```\nThat is it.", "print(1)\nprint(2)"),
        ("Here it is: ```python\nprint(1)\n```\nDone.", "print(1)\n"),
        # CommonMark: tildes, other ends of lines
        ("~~~python\nprint(1)\n~~~\n", "print(1)\n"),
        ("```python\r\nprint(1)\r\n```\r\n", "print(1)\r\n"),
        # benchlocal-cli 120, lm-evaluation-harness 3769: the prompt opened the fence; one too many
        ("def f():\n    return 1\n```", "def f():\n    return 1\n"),
        ("```python\nprint(1)\n```\n```", "print(1)\n"),
        # LiveCodeBench 118: text after the program
        ("```python\nprint(1)\n```\nRun it:\n```bash\npython a.py\n```", "print(1)\n"),
        ("```text\nprint(1)\n```", "print(1)\n"),
        # verl 4757: thoughts are no answer
        ("<think>```python\nprint(2)\n``` or</think>\n```python\nprint(1)\n```", "print(1)\n"),
        ("<answer>print(1)</answer>", "print(1)"),
        ("with `a` and ```b``` in it:\n```\nprint('```x```')\n```\nas ```c```", "print('```x```')\n"),
        ("````\ns = '''\n```\n'''\n````", "s = '''\n```\n'''\n"),  # CommonMark: four backquotes, indentation
        ("1. So:\n   ```python\n   if 1:\n     print(1)\n   ```", "if 1:\n  print(1)\n"),
        ("```\ndef f():\n    '''\n    ```\n    '''\n```", "def f():\n    '''\n    ```\n    '''\n"),
        ("```python\nprint(1)\n```python\nprint(2)\n```", "print(2)\n"),  # LiveCodeBench's extract_code
        ("<answer>```python\nprint(1)\n```</answer>", "print(1)\n"),  # EleutherAI/lm-evaluation-harness 3710
    ],
)
def test_the_last_code_block_is_the_program(response, program):
    assert program_of(response) == program


def test_a_block_that_the_prompt_opens_ends_at_the_first_fence():
    """As with mbpp_instruct of EleutherAI/lm-evaluation-harness, 3710."""
    for text, right in (("Write f.\n```python\n", 1), ("For example:\n```\nf(1)\n```", 0)):
        prompt = replace(prompt_for(tests="assert f(1) == 2"), text=text)
        assert score(prompt, "def f(a):\n    return a + 1\n```\nThis adds 1.") == right


def test_output_is_compared_line_by_line():
    for written, expected in (("1 2  \n\n", "1 2\n"), ("2.50", "2.5"), ("1\r\n2\r\n", "1\n2")):
        assert is_right(Outcome(None, 0, written.encode()), expected), written
    assert not is_right(Outcome(None, 0, b"1\n2\n"), "1 2") and not is_right(Outcome(None, 0, b"1e5"), "100000")
    for more in (b"1 1", b"1\n2"):
        assert not is_right(Outcome(None, 0, more), "1")
    assert not is_right(Outcome("time", 0, b"1"), "1") and not is_right(Outcome(None, 1, b"1"), "1")


def test_programs_are_scored_by_pairs_of_input_and_output():
    pairs = [{"input": "1 2\n", "output": "3\n"}, {"input": "2 2\n", "output": "5\n"}]
    lists = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}
    assert score(prompt_for(tests=pairs), ADD) == 0
    assert score(prompt_for(tests=pairs), ADD, partial_credit=True) == 0.5
    assert score(prompt_for(tests=pairs[:1]), ADD) == 1
    assert score(prompt_for(json.dumps(lists)), ADD) == 1
    adds = f"```cpp\n#include <iostream>\n{SUM}\n```"
    assert score(prompt_for(tests=lists, language="C++"), adds) == 1
    assert score(prompt_for(tests=lists), adds) == 0, "it is not Python"
    assert score(prompt_for(tests=lists), "int main() {", language="cpp") == 0


ECHOES = prompt_for(tests=[{"input": f"{number}\n", "output": f"{number}\n"} for number in range(10)])


def test_all_tests_of_a_response_have_one_budget(monkeypatch):
    """A program that sleeps, or computes a little less than one test allows, does so only a few times."""
    verifier = Code(RewardTable(kind="code", partial_credit=True, seconds=1))
    quick = verifier.score(ECHOES, "print(input())")
    assert (quick.value, quick.over) == (1.0, None)
    monkeypatch.setattr(code, "BUDGET", 1.5)
    for wait in ("time.sleep(1.2)", "while time.process_time() < 0.7: pass"):
        found = verifier.score(ECHOES, f"import time\n{wait}\nprint(input())")
        assert found.value <= 4 / 10 and found.over == "time"


def test_each_call_of_assertions_has_the_time_of_a_test():
    tests = prompt_for(tests=[f"assert f({number}) == {number}" for number in range(4)])
    busy = "from time import process_time as now\ndef f(a):\n    end = now() + {}\n"
    busy += "    while now() < end: pass\n    return a"
    assert score(tests, busy.format(0.6), seconds=1) == 1  # 2.4 s in all
    assert score(tests, busy.format("3 * (a == 3)"), seconds=1) == 0


def test_nothing_is_run_after_a_test_that_took_too_long():
    verifier = Code(RewardTable(kind="code", partial_credit=True, seconds=1))
    found = verifier.score(ECHOES, "n = int(input())\nwhile n == 2: pass\nprint(n)")
    assert (found.value, found.over) == (0.2, "time")
    assert verifier.score(ECHOES, "n = int(input())\nif n == 2: bytearray(1 << 40)\nprint(n)").value == 0.9


ASSERTIONS = [  # and a program for which they hold
    ("assert add(1, 2) == 3\nassert add([1], [2]) == [1, 2]", "def add(a, b): return a + b"),
    ("assert math.isclose(half(1), .5)", "def half(a): return a / 2"),
    (
        "try:\n    f(0)\nexcept IndexError as e:\n    assert str(e) == 'no'",
        "class E(IndexError): pass\ndef f(a): raise E('no')",
    ),
    ("s = Stack()\ns.push(1)\nassert s.pop() == 1\nassert not s", "class Stack(list): push = list.append"),
    ("assert list(upto(3)) == [0, 1, 2]", "def upto(n): yield from range(n)"),
    ("assert same((1, {2: {3}}, b'4', 5j, None)) == (1, {2: {3}}, b'4', 5j, None)", "def same(a): return a"),
    ("assert same(float('inf')) > 10 ** 300\nassert same(10 ** 5000) % 7 == 2", "def same(a): return a"),
    ("assert greet('x') == 'x'", "print('noise')\ninput\ndef greet(a): print(a); return a"),
    ("assert f(1) == 1", "if __name__ == '__main__': raise SystemExit\ndef f(a): return a"),
]
KODCODE = "from solution import f\n\ndef test_one():\n    assert f(1) == 2\n\ndef test_two():\n    assert f(2) == 3\n"
LCB = {"testtype": "functional", "metadata": {"func_name": "f"}}  # as in DeepCoder's subset lcbv5
CALLED = {"type": "function_call", "fn_name": "f"}  # as in PrimeIntellect/SYNTHETIC-1
INCREMENT, WRONG, SUMS = "def f(a): return a + 1", "def f(a): return 2", "def sum(a): return 2"
HUMANEVAL = prompt_for(tests="def check(candidate):\n    assert candidate(2) == 4\n", entry_point="f")
RETURNED = [  # what is expected, what a function returns instead, and what is wrong
    (0.3, "0.1 + 0.2", "0.3000001"),
    ({"1": [2]}, "{1: (2,)}", "{1: [2], '1': [2]}"),
    ([3], "3", "4"),
    ([3, 4], "(3, 4)", "3"),
    (float("inf"), "1e999", "10**300"),
    (10**17, "10**17", "10**17 + 1"),
]


@pytest.mark.parametrize(
    ("tests", "right", "wrong"),  # tests: the column, or a prompt
    [
        *((tests, program, "pass") for tests, program in ASSERTIONS),
        (HUMANEVAL, "def f(a): return a * a", "def f(a): return a"),
        (prompt_for(tests="assert sum([1]) == 2", entry_point="sum"), "def sum(a): return 2", "def sum(a): return 1"),
        (prompt_for(tests="assert sum([1]) == 2", code="def sum(a): ..."), "def sum(a): return 2", "sum = len"),
        ("assert sum([1]) == f(1)", f"{SUMS}\ndef f(a): return 1", f"{SUMS}\ndef f(a): return 2"),  # Python's own sum
        (KODCODE, INCREMENT, WRONG),  # KodCode/KodCode-V1, which runs pytest
        (
            f"{KODCODE}\nclass TestF:\n    def test_f(self):\n        assert f(3) == 4\n",
            INCREMENT,
            "def f(a): return 2 + (a > 1)",
        ),
        ("def run():\n    assert f(4) == 5\nif __name__ == '__main__':\n    run()", INCREMENT, WRONG),
        (["assert f(1) == 2", "assert f(2) == 3"], INCREMENT, WRONG),  # TIGER-Lab/AceCode-87K
        ([{"input": "4", "output": "5", **LCB}], "class Solution:\n    def f(self, a: List): return a + 1", WRONG),
        ([{"input": '"a\u2028b"\n[1]\n', "output": "4", **LCB}], "def f(a, b): return len(a + str(b[0]))", WRONG),
        ([{"input": [4], "output": [5], **CALLED}], INCREMENT, WRONG),
        ([{"input": "4", "output": "5", **CALLED, "fn_name": None}], "print(int(input()) + 1)", "print(4)"),
        ({"inputs": [[{"1": 4}]], "outputs": [5], "fn_name": "f"}, "def f(a): return a[1] + 1", WRONG),  # APPS
        ({"inputs": [["2", "3"]], "outputs": ["5"]}, "print(int(input()) + int(input()))", "print(4)"),  # APPS
        ({"inputs": ["4"], "outputs": [["4", "5"]]}, "print(4)\nprint(5)", "print(4, 5)"),  # APPS
        ({"inputs": [[4]], "outputs": [5], "fn_name": "f"}, "def f(a): return max(Counter([a + 1]))", WRONG),
        ({"inputs": [[4]], "outputs": [24], "fn_name": "factorial"}, "def factorial(n): return 24", "pass"),
        (f'{{"inputs": [[0]], "outputs": [{"9" * 5000}], "fn_name": "f"}}', "def f(a): return 10**5000 - 1", WRONG),
        *(
            ({"inputs": [[0]], "outputs": [expected], "fn_name": "f"}, *(f"def f(a): return {x}" for x in returned))
            for expected, *returned in RETURNED
        ),
        ([{"input": "", "output": "1234567\n" * 700_000}], "print('1234567\\n' * 700_000)", "print('1\\n' * 700_000)"),
    ],
)
def test_a_right_program_scores_1_and_a_wrong_one_0(tests, right, wrong):
    """5000 digits: stanford-crfm/helm 1381."""
    prompt = tests if isinstance(tests, Prompt) else prompt_for(tests=tests)
    assert (score(prompt, right), score(prompt, wrong)) == (1, 0)


@pytest.mark.parametrize(
    ("tests", "program"),
    [
        ("assert apply(lambda a: a, 1) == 1", "def apply(f, a): return f(a)"),
        ("assert same(make().items) == 1", "def make(): return {}\ndef same(a): return 1"),  # only of this program
    ],
)
def test_a_response_to_which_tests_pass_a_function_is_wrong_and_counted(tests, program):
    found = Code(RewardTable(kind="code")).score(prompt_for(tests=tests), program)
    assert (found.value, found.over) == (0.0, "arguments that are no plain data")
    assert score(prompt_for(tests=tests), "class make: items = 1\ndef same(a): return a") == ("make" in tests)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "tests must be a list"),
        ({"tests": [{"input": "1"}]}, "a test needs input and output"),
        ({"tests": {"inputs": ["1"], "outputs": []}}, "two lists of the same length"),
        ({"tests": {"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}}, "a list of arguments"),
        ({"tests": {"inputs": [[1]], "outputs": [1], "fn_name": "f()[0]; g"}}, "is not the name of a function"),
        ({"tests": {"inputs": [""], "outputs": [""], "harness": "lcb"}}, "'lcb' of tests: known are livecodebench, "),
        ({"tests": "assert f( == 1"}, "not valid Python"),
        ({"tests": "f(1)"}, "no assert statement"),
        ({"tests": "def check(candidate):\n    assert candidate(1) == 2"}, "outside of check.*column entry_point"),
        ({"tests": "class F:\n    def test_f(self):\n        assert f(1) == 2"}, "outside of F, which nothing"),
        ({"tests": "def test_f(capsys):\n    assert f(1) == 2"}, "test_f of the tests has parameters"),
        ({"tests": "async def test_f():\n    assert f(1) == 2"}, "outside of test_f, which nothing calls"),
        ({"tests": "import numpy\nassert f(1) == 1"}, "import 'numpy', but"),
        ({"tests": "assert f(1) == 1", "language": "cpp"}, "assert statements and fn_name are for Python only"),
        ({"tests": "assert f(1) == 1", "language": "cobol"}, "'cobol' is not supported; known are python"),
    ],
)
def test_rows_without_usable_tests_are_refused(columns, message):
    with pytest.raises(UserError, match=message):
        read_tests(prompt_for(**columns), "python")


def test_a_recipe_for_code_is_checked_row_by_row(tmp_path):
    good, bad = ({"prompt": "?", "answer": "see tests", "tests": tests} for tests in ("assert f(1) == 1", "f(1)"))
    file = write(tmp_path / "p.jsonl", [good, bad, good, bad])
    with pytest.raises(UserError, match=r"p.jsonl, line 2: the tests contain no assert.*\n.*line 4: "):
        check_reward(recipe(file=file, kind="code"))
    check_reward(recipe(file=write(file, [good]), kind="code"))
    with pytest.raises(UserError, match="needs prompt files"):
        check_reward(recipe("chain_sum", kind="code"))


def test_a_warning_counts_rows_whose_tests_expect_no_output(tmp_path):
    some = [{"input": "1", "output": ""}, {"input": "2", "output": "2"}]
    tests = [some[:1], some, [some[0] | {"output": " \n"}], "assert f(1) == 1"]
    file = write(tmp_path / "p.jsonl", [{"prompt": "?", "answer": "see tests", "tests": one} for one in tests])
    with pytest.warns(UserWarning, match="^2 prompts have only tests that expect no output"):
        check_reward(recipe(file=file, kind="code"))


def test_a_precompiled_header_is_used_only_where_it_cannot_change_the_program(tmp_path, monkeypatch):
    def adds(program):
        return score(prompt_for(tests=[{"input": "1 2", "output": "3"}]), program, language="cpp")

    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path))
    marked = SUM.replace("a + b", "a + b + precompiled")
    assert adds(f"#include <iostream>\n{SUM}") == 1, "without precompiled headers"
    cpp.precompile("iostream", "#include <iostream>\nconstexpr int precompiled = 0;")
    assert cpp.compiled(f"// why\n#define mine\n#include<iostream>\n{marked}".encode()).succeeded
    for before in ("#include <vector>", "#define private public"):
        assert not cpp.compiled(f"{before}\n#include <iostream>\n{marked}".encode()).succeeded, before
    assert adds(f"#include <vector>\n#include <iostream>\n{SUM}") == 1
    assert adds(f"#include <iostream>\nstd::map<int, int> m;\n{SUM}") == 0, "it does not include <map>"
    path = cpp.headers_folder() / "iostream.gch"
    path.write_bytes(b"?" + path.read_bytes()[1:])
    assert adds(f"#include <iostream>\n{SUM}") == 1, "a damaged precompiled header is not used"


def test_headers_that_cannot_be_written_are_only_reported(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGARL_CACHE", str(tmp_path / "file"))
    cpp.make_headers()
    assert "without precompiled headers: " in capsys.readouterr().err
