"""The verifier that runs programs against the tests of their row in a sandbox (`megarl.rewards.sandbox`).

The program is the last fenced code block of a response, or the whole response if it has none. Of a pair of input and
output only the input enters the sandbox; the output is compared here. Assertions run in a second sandbox, which the
program cannot reach (`megarl.rewards.inside`). A program that crashes, hangs or exceeds a limit is wrong.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import json
import re
import secrets
import select
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.data.prompts import Prompt, PromptSource
from megarl.errors import Note, UserError
from megarl.recipe.tables import Recipe, RewardTable
from megarl.rewards import TAGGED, Score, Verifier, check_rows, cpp, inside
from megarl.rewards.harness import HARNESSES, LIVECODEBENCH, PLAIN, Harness
from megarl.rewards.sandbox import (
    POLL_SECONDS,
    Limits,
    Outcome,
    Program,
    Run,
    check_sandbox,
    python_command,
    run,
    twice,
)

INSIDE = Path(inside.__file__).parent
UNUSABLE = 3  # exit status of the tests: `asserting.UNUSABLE`
LANGUAGES = {"python": "python", "python3": "python", "py": "python", "cpp": "cpp", "c++": "cpp"}
BUDGET = 10  # seconds of all tests of a response together, in units of ``reward.seconds``
FENCE = re.compile(r"(.*?)(?<!`)(`{3,}+)([^`]*)")  # what stands before a fence, the fence, and what follows it
# at the end of a prompt: a block that the response continues
OPENED = re.compile(r"^ *`{3,}[\w+#.-]+\s*\Z", re.MULTILINE)
LANGUAGE = re.compile(r"[\w+#.-]*\s*")
TAGS = re.compile(r"\s*(?:</\w+>\s*)*")  # such as </answer>
TILDES = re.compile(r"^( *)(~{3,})", re.MULTILINE)  # the other sign of a fence
OTHER = re.compile(r"\s*(?:te?xt|plaintext|output|console|bash|sh|shell)\b", re.IGNORECASE)
# the program may print integers of any length
PYTHON = functools.partial(python_command, "-X", "int_max_str_digits=0")


@dataclass(frozen=True)
class Tests:
    """The tests of one row: either pairs of input and output, or assertions."""

    language: str
    pairs: tuple[tuple[str, str], ...] = ()  # standard input of a program, and the standard output that is expected
    assertions: str = ""  # Python code with assertions about names that the program defines
    entry_point: str | None = None  # the function under test; needed only if its name is that of a builtin function
    preamble: str = ""  # Python that runs before the program, in its module
    harness: Harness = PLAIN


def check(recipe: Recipe) -> None:
    """Raise `UserError` if a row has no tests, or if its language cannot be run in a sandbox on this machine.

    Warns of rows whose tests every program passes that prints nothing.
    """
    if any(table.source != "file" for table in recipe.prompt_sources()):
        raise UserError('reward.kind = "code" needs prompt files, whose rows have tests; generators have none')
    languages: set[str] = set()
    silent: list[Prompt] = []

    def check_row(prompt: Prompt) -> None:
        tests = read_tests(prompt, recipe.reward.language)
        languages.add(tests.language)
        if tests.pairs and not any(expected.strip() for _, expected in tests.pairs):
            silent.append(prompt)

    check_rows(recipe, check_row)
    if silent:
        warnings.warn(f"{len(silent)} prompts have only tests that expect no output", Note, stacklevel=2)
    check_sandbox()
    if "cpp" in languages:
        if not cpp.COMPILER.exists() or not cpp.compiled(b"int main() {}").succeeded:
            raise UserError("C++ programs need g++ in /usr/bin, and it does not work in the sandbox: apt install g++")
        cpp.make_headers()


def build(table: RewardTable, prompts: PromptSource) -> Verifier:
    """See `VerifierModule`."""
    check_sandbox()
    if table.language == "cpp":
        cpp.make_headers()  # this node may not be the one where `check` was called
    return Code(table)


class Code:
    """Scores 1 if all tests pass, else 0; with ``reward.partial_credit`` the share of input/output pairs that pass.

    After the first pair at which the program takes too long, or when all together have, the rest counts as failed.
    """

    def __init__(self, table: RewardTable) -> None:
        self._language, self._partial = table.language, table.partial_credit
        self._limits = Limits(seconds=table.seconds, memory=table.memory_mb << 20)

    def score(self, prompt: Prompt, response: str) -> Score:
        opened = OPENED.search(prompt.text[-100:])
        tests, source = read_tests(prompt, self._language), program_of((opened[0] if opened else "") + response)
        if tests.assertions:
            return self._assert(source, tests)
        program = Program(PYTHON("/box/main.py"), {"/box/main.py": _bytes(source)})
        if tests.preamble:
            program = _script("running.py", _sources(source, tests))
        if tests.language == "cpp":
            binary = cpp.compiled(_bytes(source))
            if not binary.succeeded:
                return Score(0.0, over=binary.over)
            program = Program(("/box/program",), {"/box/program": binary.output})
        return self._compare(program, tests)

    def _compare(self, program: Program, tests: Tests) -> Score:
        right, over, left = 0, None, float(BUDGET * self._limits.seconds)
        for number, (given, expected) in enumerate(tests.pairs):
            if left <= 0:
                over = over or "time"
            if over in ("time", "asleep") or (right < number and not self._partial):
                break
            limits = replace(self._limits, output=self._limits.output + len(expected.encode()))
            outcome = run(program, given.encode(), limits)
            left -= outcome.seconds
            over = over or outcome.over
            right += is_right(outcome, expected, tests.harness)
        share = right / len(tests.pairs)
        return Score(share if self._partial else float(share == 1), over=over)

    def _assert(self, source: str, tests: Tests) -> Score:
        passed, ended, program = twice(functools.partial(asserted, source, tests, self._limits))
        unusable = "arguments that are no plain data" if ended.code == UNUSABLE else None
        return Score(float(passed), over=program.over or ended.over or unusable)


def program_of(response: str) -> str:
    """The content of the last fenced code block after any thoughts; all that stands there if it has none.

    A fence may end a line of text or of the program. As in CommonMark, the indentation of a block is not part of it,
    and what closes it has as many backquotes and is no more than three columns further right. A block that says that it
    is a shell's, or text, is the program only if there is no other.
    """
    response = response.partition("</think>")[2] or response
    response = TILDES.sub(lambda tildes: tildes[1] + "`" * len(tildes[2]), response)
    found: str | None = None
    block: list[str] | None = None
    ticks = indent = ""
    other = False
    for line in response.splitlines(keepends=True):
        before, fence, after = match.groups() if (match := FENCE.fullmatch(line)) else (line, "", "")
        alone = fence and not before.strip()
        if block is None:
            if alone or (fence and "```" not in before and LANGUAGE.fullmatch(after)):
                block, ticks, indent = [], fence, before if alone else ""
                other = OTHER.match(after) is not None
        elif len(fence) < len(ticks) or (alone and len(before) > len(indent) + 3):
            block.append(line.removeprefix(indent))
        elif alone and after.strip() and LANGUAGE.fullmatch(after):  # another block: that before it was never closed
            block, ticks, other = [], fence, OTHER.match(after) is not None
        elif alone or ("```" not in before and TAGS.fullmatch(after)):
            if found is None or not other:
                found = "".join(block if alone else [*block, before])
            block = None
        else:
            block.append(line)
    if block is not None and (rest := "".join(block)).strip():  # never closed
        return rest
    if block is not None and found is None:  # the prompt opened what the only fence closes
        return response[: response.rindex(ticks)]
    return (TAGGED.findall(response) or [response])[-1] if found is None else found


def is_right(outcome: Outcome, expected: str, harness: Harness = PLAIN) -> bool:
    """Whether a program succeeded and wrote the expected output, as ``harness`` compares it."""
    return outcome.succeeded and harness.agrees(outcome.output.decode(errors="replace"), expected)


def asserted(source: str, tests: Tests, limits: Limits) -> tuple[bool, Outcome, Outcome]:
    """Run a row's assertions on a program: whether all held, how the tests ended, and how the program ended.

    Each call of the program may take ``limits.seconds``, all together `BUDGET` times that.
    """
    passed = 100 + secrets.randbelow(100)  # the tests' exit status for success, drawn anew for each run
    task = {"tests": tests.assertions, "entry_point": tests.entry_point, "passed": passed}
    values = {"/box/values.py": (INSIDE / "values.py").read_bytes()}
    of_call = {"/box/seconds": str(limits.seconds).encode()}
    solution = _script("solution.py", values | _sources(source, tests) | of_call)
    asserting = _script("asserting.py", values | {"/box/tests.json": json.dumps(task).encode()})
    limits = replace(limits, seconds=BUDGET * limits.seconds)
    with contextlib.ExitStack() as stack:
        of_program, of_tests = socket.socketpair()
        with of_program, of_tests:
            program = stack.enter_context(Run(solution, limits, of_program.fileno(), of_program.fileno()))
            judge = stack.enter_context(Run(asserting, limits, of_tests.fileno(), of_tests.fileno()))
        while not judge.ended():
            select.select([judge.fileno()], [], [], POLL_SECONDS)
            if judge.is_asleep(program):
                program.stop("asleep")
        program.stop()
        ended = judge.finish()
        return ended.over is None and ended.code == passed, ended, program.finish()


def _script(name: str, files: dict[str, bytes]) -> Program:
    """A program for the sandbox that runs a script of `megarl.rewards.inside` beside these files."""
    return Program(PYTHON(f"/box/{name}"), {f"/box/{name}": (INSIDE / name).read_bytes()} | files)


def _sources(source: str, tests: Tests) -> dict[str, bytes]:
    sources = {"preamble.py": tests.preamble, "program.py": source, "entry_point": tests.entry_point or ""}
    return {f"/box/{name}": _bytes(text) for name, text in sources.items()}


def _bytes(source: str) -> bytes:
    return source.encode(errors="replace")


@contextlib.contextmanager
def _any_digits() -> Iterator[None]:
    """Lets Python read and write integers of any length, as some tests of APPS and TACO have them."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        yield
    finally:
        sys.set_int_max_str_digits(before)


@_any_digits()
def read_tests(prompt: Prompt, language: str) -> Tests:
    """The tests in the column ``tests`` of the prompt's row, or else in its answer; `UserError` if they are unusable.

    language: that of programs for rows without a column ``language``.
    """
    row = prompt.entry["metadata"]
    given = row.get("language") or language
    if str(given).lower() not in LANGUAGES:
        raise UserError(f"language {given!r} is not supported; known are {', '.join(LANGUAGES)}")
    language = LANGUAGES[str(given).lower()]
    found = row.get("tests") or prompt.answer
    if isinstance(found, str) and found.lstrip()[:1] in ("[", "{"):
        found = _from_json(found)
    harness, name = PLAIN, None
    if isinstance(found, list) and found and all(isinstance(test, Mapping) for test in found):
        found = _called(found)
    if isinstance(found, Mapping):
        harness, name = _harness(found.get("harness")), found.get("fn_name") or row.get("fn_name")
        found = _pairs_of_lists(found, name, harness)
    # programs of APPS and TACO, whose graders import such names, may use Counter and others without an import
    default = LIVECODEBENCH if harness is PLAIN and name else harness.preamble
    preamble = (row.get("preamble") or default) if language == "python" else ""
    if isinstance(found, list) and found and all(isinstance(test, Mapping) for test in found):
        return Tests(language, pairs=tuple(map(_pair, found)), preamble=preamble, harness=harness)
    if isinstance(found, list) and found and all(isinstance(test, str) for test in found):
        found = "\n".join(found)
    if not isinstance(found, str) or not found.strip():
        raise UserError(
            'tests must be a list of {"input": ..., "output": ...}, {"inputs": [...], "outputs": [...]}, or Python '
            f"with assert statements; got {found!r:.60}"
        )
    if language != "python":
        raise UserError(
            f"this row's language is {language!r}, which needs pairs of input and output; assert statements and "
            f"fn_name are for Python only; got {found!r:.60}"
        )
    entry_point = row.get("entry_point") or name or _builtin(row.get("code"), found)
    return Tests(language, (), _assertions(found, row), entry_point, preamble)


def _builtin(code: object, tests: str) -> str | None:
    """The function of the row's solution that the tests call, if it has the name of a builtin one, as MBPP's sum."""
    names = re.findall(r"^def (\w+)", code, re.MULTILINE) if isinstance(code, str) else []
    return next((name for name in names if name in dir(builtins) and re.search(rf"\b{name}\(", tests)), None)


def _harness(name: object) -> Harness:
    if name is not None and name not in HARNESSES:
        raise UserError(f"harness {name!r} of tests: known are {', '.join(HARNESSES)}")
    return HARNESSES[str(name)] if name else PLAIN


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text  # it may be Python code, which can begin with a bracket, too


def _called(tests: list[Mapping[str, Any]]) -> Any:
    """Tests of DeepCoder's and SYNTHETIC-1's files in the form of APPS, if the first names the function to call; those
    of LiveCodeBench, which have a ``testtype``, with its harness."""
    about = tests[0].get("metadata") or {}
    about = _from_json(about) if isinstance(about, str) else about
    name = tests[0].get("fn_name") or (about.get("func_name") if isinstance(about, Mapping) else None)
    if name is None and "testtype" not in tests[0]:
        return tests
    lists = {f"{side}s": [test.get(side) for test in tests] for side in ("input", "output")}
    return {**lists, "fn_name": name, "harness": "livecodebench" if "testtype" in tests[0] else None}


def _pairs_of_lists(found: Mapping[str, Any], name: Any, harness: Harness) -> Any:
    """Convert {"inputs": [...], "outputs": [...]}, the form of APPS and TACO, to pairs, or to assert statements.

    The latter with "fn_name": each of the inputs is then a list of the function's arguments; with a benchmark's harness
    it may be JSON, an argument on each line.
    """
    inputs, outputs = found.get("inputs"), found.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs) or not inputs:
        raise UserError("tests need inputs and outputs, two lists of the same length")
    pairs = list(zip(inputs, outputs, strict=True))
    if name is None:
        return [{"input": given, "output": expected} for given, expected in pairs]
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise UserError(f"fn_name {name!r} is not the name of a function")
    if harness is not PLAIN and all(isinstance(text, str) for pair in pairs for text in pair):
        try:
            # not splitlines, since a text in JSON may have other line ends in it
            pairs = [
                ([json.loads(line) for line in given.split("\n") if line.strip()], json.loads(expected))
                for given, expected in pairs
            ]
        except (ValueError, RecursionError) as error:
            raise UserError(f"inputs and outputs of {name} are not JSON: {error}") from error
    if not all(isinstance(given, list) for given, _ in pairs):
        raise UserError("with fn_name each of inputs must be a list of arguments")
    if harness is PLAIN:
        pairs = [([*map(_numbered, given)], expected) for given, expected in pairs]
    return [f"assert __{harness.returns}__({name}(*{given!r}), {expected!r})" for given, expected in pairs]


def _numbered(value: Any) -> Any:
    """An argument with whole numbers for keys that are texts of them, which JSON had made of them (as APPS' grader)."""
    if isinstance(value, dict) and all(isinstance(key, str) and re.fullmatch(r"-?\d+", key) for key in value):
        return {int(key): item for key, item in value.items()}
    return value


def _pair(test: Mapping[str, Any]) -> tuple[str, str]:
    sides = (test.get("input"), test.get("output"))  # texts or lists of lines
    given, expected = ("\n".join(map(str, side)) if isinstance(side, list) else side for side in sides)
    if not isinstance(given, str) or not isinstance(expected, str):
        raise UserError(f"a test needs input and output, both strings; got {dict(test)!r:.60}")
    return given, expected


def _assertions(text: str, row: Mapping[str, Any]) -> str:
    setup, entry_point = row.get("test_setup") or "", row.get("entry_point")
    text = f"{setup}\n{text}"
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UserError(f"the tests are not valid Python: {error}") from error
    nodes = list(ast.walk(tree))
    defined = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    called = {node.id for node in nodes if isinstance(node, ast.Name)}
    if entry_point and any(node.name == "check" for node in defined):
        text += f"\ncheck({entry_point})\n"
        called.add("check")
    for node in defined:  # as pytest does
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test") and node.name not in called:
            if len(node.args.args) > len(node.args.defaults):
                raise UserError(f"{node.name} of the tests has parameters: fixtures of pytest are not supported")
            text += f"\n{node.name}()\n"
            called.add(node.name)
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test") and node.name not in called:
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            if all(each.name.startswith("test") and len(each.args.args) == 1 for each in methods):  # no fixtures
                text += "".join(f"\n{node.name}().{each.name}()\n" for each in methods)
                called.add(node.name)
    idle = [node for node in defined if node.name not in called]
    asserts = sum(isinstance(node, ast.Assert) for node in nodes)
    if asserts == sum(isinstance(node, ast.Assert) for each in idle for node in ast.walk(each)):
        why = f" outside of {idle[0].name}, which nothing calls; check needs a column entry_point" if asserts else ""
        raise UserError(f"the tests contain no assert statement{why}")
    imports = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imports += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    for name in (path.split(".")[0] for path in imports):
        if name not in sys.stdlib_module_names and name != "solution":
            raise UserError(f"the tests import {name!r}, but the sandbox has only Python's standard library")
    return text
