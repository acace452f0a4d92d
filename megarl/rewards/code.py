"""The verifier that runs programs against the tests of their row in a sandbox (`megarl.rewards.sandbox`).

The program is the last fenced code block of a response, or the whole response if it has none. Of a pair of input and
output only the input enters the sandbox; the output is compared here. Assertions run in a second sandbox, which the
program cannot reach (`megarl.rewards.inside`). A program that crashes, hangs or exceeds a limit is wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import select
import warnings
from decimal import Decimal
from pathlib import Path

from megarl.data.prompts import Prompt, PromptSource
from megarl.errors import UserError
from megarl.recipe.tables import Recipe, RewardTable
from megarl.rewards import Score, Verifier, check_rows, cpp, cpp_headers, inside
from megarl.rewards.code_tests import Assertions, InputOutput, Tests, read_tests
from megarl.rewards.sandbox import (
    POLL_SECONDS,
    Limits,
    Outcome,
    Program,
    Run,
    SandboxError,
    check_sandbox,
    python_command,
    run,
)

INSIDE = Path(inside.__file__).parent
NUMBER = re.compile(r"[-+]?\d{1,40}(\.\d{0,40})?")


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
        if tests.pairs and not any(pair.stdout.strip() for pair in tests.pairs):
            silent.append(prompt)

    check_rows(recipe, check_row)
    if silent:
        warnings.warn(f"{len(silent)} prompts have only tests that expect no output", stacklevel=2)
    check_sandbox()
    if "cpp" in languages:
        if not cpp_headers.COMPILER.exists() or not cpp.compiled(b"int main() {}").succeeded:
            raise UserError("C++ programs need g++ in /usr/bin, and it does not work in the sandbox: apt install g++")
        cpp_headers.make_headers()


def build(table: RewardTable, prompts: PromptSource) -> Verifier:
    """See `VerifierModule`."""
    check_sandbox()
    if table.language == "cpp":
        cpp_headers.make_headers()  # this node may not be the one where `check` was called
    return Code(table)


class Code:
    """Scores 1 if all tests pass, else 0; with ``reward.partial_credit`` the share of input/output pairs that pass."""

    def __init__(self, table: RewardTable) -> None:
        self._language, self._partial = table.language, table.partial_credit
        self._limits = Limits(seconds=table.seconds, memory=table.memory_mb << 20)

    def score(self, prompt: Prompt, response: str) -> Score:
        tests, source = read_tests(prompt, self._language), program_of(response)
        if tests.assertions is not None:
            return self._assert(source, tests.assertions, prompt)
        program = _python(source)
        if tests.language == "cpp":
            binary = cpp.compiled(_bytes(source))
            if not binary.succeeded:
                return Score(0.0, over=binary.over)
            program = Program(("/box/program",), {"/box/program": binary.output})
        return self._compare(program, tests)

    def _compare(self, program: Program, tests: Tests) -> Score:
        right, over = 0, None
        for pair in tests.pairs:
            outcome = run(program, pair.stdin.encode(), self._limits)
            over = over or outcome.over
            right += is_right(outcome, pair)
            if not self._partial and not is_right(outcome, pair):
                return Score(0.0, over=over)
        return Score(right / len(tests.pairs), over=over)

    def _assert(self, source: str, assertions: Assertions, prompt: Prompt) -> Score:
        for attempt in (1, 2):
            try:
                tests, program = asserted(source, assertions, self._limits)
                break
            except SandboxError:
                if attempt == 2:
                    raise
        if tests.over is None and tests.code == UNUSABLE:
            raise UserError(
                f"the tests of prompt {prompt.text[:60]!r} pass an object that is not plain data, such as a function, "
                "to the program: only plain data can be sent between the sandboxes of tests and program"
            )
        return Score(float(tests.over is None and tests.code == PASSED), over=program.over or tests.over)


UNUSABLE, PASSED = 3, -1000  # exit codes: `asserting.UNUSABLE`; what `asserted` returns if all tests passed


def program_of(response: str) -> str:
    """The content of the last fenced code block; the whole response if it has none."""
    found: str | None = None
    block: list[str] | None = None
    for line in response.splitlines(keepends=True):
        if line.lstrip().startswith("```"):
            if block is None:
                block = []
            else:
                found, block = "".join(block), None
        elif block is not None:
            block.append(line)
    if block is not None:  # never closed
        found = "".join(block)
    return response if found is None else found


def is_right(outcome: Outcome, pair: InputOutput) -> bool:
    """Whether a program succeeded and wrote the expected output.

    White space at the ends of lines and of the output is ignored, and equal numbers may differ in form: 2.50 and 2.5.
    """
    if not outcome.succeeded:
        return False
    found, expected = (_lines(text) for text in (outcome.output.decode(errors="replace"), pair.stdout))
    return found == expected or (len(found) == len(expected) and all(map(_same_words, found, expected)))


def asserted(source: str, assertions: Assertions, limits: Limits) -> tuple[Outcome, Outcome]:
    """Run a row's assertions on a program; returns how the tests ended, and how the program ended.

    The tests' outcome has the code `PASSED` if all assertions held.
    """
    passed = 100 + secrets.randbelow(100)  # the tests' exit status for success, drawn anew for each run
    task = {"tests": assertions.text, "entry_point": assertions.entry_point, "passed": passed}
    files = {"/box/values.py": (INSIDE / "values.py").read_bytes()}
    solution = _with(files, "solution.py", {"/box/program.py": _bytes(source)})
    asserting = _with(files, "asserting.py", {"/box/tests.json": json.dumps(task).encode()})
    with contextlib.ExitStack() as stack:
        requests, to_program = os.pipe()
        replies, to_tests = os.pipe()
        ends = [requests, to_program, replies, to_tests]
        try:
            program = stack.enter_context(Run(solution, limits, requests, to_tests))
            tests = stack.enter_context(Run(asserting, limits, replies, to_program))
        finally:
            for end in ends:
                os.close(end)
        while not tests.ended():
            select.select([tests.fileno()], [], [], POLL_SECONDS)
            if tests.is_asleep(program):
                program.stop("asleep")
        program.stop()
        tests_outcome = tests.finish()
        program_outcome = program.finish()
    if tests_outcome.over is None and tests_outcome.code == passed:
        return Outcome(None, PASSED, b""), program_outcome
    return tests_outcome, program_outcome


def _with(files: dict[str, bytes], script: str, more: dict[str, bytes]) -> Program:
    """A program for the sandbox that runs ``script`` of `megarl.rewards.inside` beside these files."""
    content = {f"/box/{script}": (INSIDE / script).read_bytes()}
    return Program(python_command(f"/box/{script}"), files | content | more)


def _python(source: str) -> Program:
    return Program(python_command("/box/main.py"), {"/box/main.py": _bytes(source)})


def _bytes(source: str) -> bytes:
    return source.encode(errors="replace")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_words(found: str, expected: str) -> bool:
    ours, theirs = found.split(), expected.split()
    return len(ours) == len(theirs) and all(
        a == b or bool(NUMBER.fullmatch(a) and NUMBER.fullmatch(b) and Decimal(a) == Decimal(b))
        for a, b in zip(ours, theirs, strict=True)
    )
