"""Programs, run against the tests of their row in a sandbox (`megarl.rewards.sandbox`).

The last fenced code block of a response is the program; without a fence the whole response is. Of a test pair only the
input enters the sandbox: output is compared here. Assertions run in a second sandbox, which the program's own cannot
reach (`megarl.rewards.inside`). A program that crashes, hangs or exceeds a limit is wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import select
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
    """There must be a sandbox here, with the languages of all rows, and every row must have tests."""
    if any(table.source != "file" for table in recipe.prompt_sources()):
        raise UserError('reward.kind = "code" needs prompt files, whose rows have tests; no generator has any')
    languages: set[str] = set()
    check_rows(recipe, lambda prompt: languages.add(read_tests(prompt, recipe.reward.language).language))
    check_sandbox()
    if "cpp" in languages:
        if not cpp_headers.COMPILER.exists() or not cpp.compiled(b"int main() {}").succeeded:
            raise UserError("C++ programs need g++ in /usr/bin, and it does not work in the sandbox: apt install g++")
        cpp_headers.make_headers()


def build(table: RewardTable, prompts: PromptSource) -> Verifier:
    """See `VerifierModule`."""
    check_sandbox()
    if table.language == "cpp":
        cpp_headers.make_headers()  # on a node where `check` was not called
    return Code(table)


class Code:
    """Scores 1 or 0; with ``reward.partial_credit`` the share of the pairs that are right."""

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
                f"the tests of prompt {prompt.text[:60]!r} pass an object to the program that is no plain value, "
                "such as a function: only plain values cross between the two sandboxes"
            )
        return Score(float(tests.over is None and tests.code == PASSED), over=program.over or tests.over)


UNUSABLE, PASSED = 3, -1000  # `asserting.UNUSABLE`; the status that was drawn, replaced where it was met


def program_of(response: str) -> str:
    """The content of the last fenced code block; without a fence the whole response."""
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
    """Whether a program ended well and wrote what it had to.

    White space at the ends of lines and of the output does not count, and a number may be written otherwise: 2.50, 2.5.
    """
    if not outcome.succeeded:
        return False
    found, expected = (_lines(text) for text in (outcome.output.decode(errors="replace"), pair.stdout))
    return found == expected or (len(found) == len(expected) and all(map(_same_words, found, expected)))


def asserted(source: str, assertions: Assertions, limits: Limits) -> tuple[Outcome, Outcome]:
    """How the tests ended, with the code `PASSED` if all held, and how the program did."""
    passed = 100 + secrets.randbelow(100)
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
        outcome = tests.finish()
        ended = program.finish()
    if outcome.over is None and outcome.code == passed:
        return Outcome(None, PASSED, b""), ended
    return outcome, ended


def _with(files: dict[str, bytes], script: str, more: dict[str, bytes]) -> Program:
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
