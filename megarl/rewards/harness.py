"""What the graders of public benchmarks give to a program, and which of its outputs they accept.

Rows of `megarl.data.formats` name their benchmark in the key ``harness`` of their tests; other rows have `PLAIN`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

NUMBER = re.compile(r"[-+]?\d{1,40}(\.\d{0,40})?")
DOUBLE = re.compile(rb"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?")
INTEGER = re.compile(rb"[-+]?\d+")
TOLERANCE = Decimal("1e-5")  # kDoublePrecision of code_contests


def lines_agree(found: str, expected: str) -> bool:
    """Equal lines but for white space, in which equal numbers may differ in form: 2.50 and 2.5."""
    ours, theirs = _lines(found), _lines(expected)
    return ours == theirs or (len(ours) == len(theirs) and all(map(_same_words, ours, theirs)))


def lines_of_decimals_agree(found: str, expected: str) -> bool:
    """LiveCodeBench's comparison (`grade_stdio`): equal lines, or lines of nothing but equal numbers, also 1e5."""
    ours, theirs = _lines(found), _lines(expected)
    return len(ours) == len(theirs) and all(map(_same_decimals, ours, theirs))


def words_agree(found: str, expected: str) -> bool:
    """CodeContests' comparison (`OutputsMatch` in execution/tester_sandboxer.cc): equal words, in any case and on any
    line; numbers that are not both integers may differ by less than 1e-5."""
    ours, theirs = (text.encode(errors="replace").lower().split() for text in (found, expected))
    return len(ours) == len(theirs) and all(map(_close_words, ours, theirs))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_words(found: str, expected: str) -> bool:
    ours, theirs = found.split(), expected.split()
    return len(ours) == len(theirs) and all(
        a == b or bool(NUMBER.fullmatch(a) and NUMBER.fullmatch(b) and Decimal(a) == Decimal(b))
        for a, b in zip(ours, theirs, strict=True)
    )


def _same_decimals(found: str, expected: str) -> bool:
    try:
        return found == expected or [*map(Decimal, found.split())] == [*map(Decimal, expected.split())]
    except InvalidOperation:  # a word that is not a number
        return False


def _close_words(found: bytes, expected: bytes) -> bool:
    if found == expected or not (DOUBLE.fullmatch(found) and DOUBLE.fullmatch(expected)):
        return found == expected
    try:
        apart = abs(Decimal(found.decode()) - Decimal(expected.decode()))
    except ArithmeticError:  # an exponent that Decimal refuses
        return False
    return apart == 0 or (apart < TOLERANCE and not (INTEGER.fullmatch(found) and INTEGER.fullmatch(expected)))


@dataclass(frozen=True)
class Harness:
    """How a benchmark runs programs.

    preamble: Python that runs before the program, in its module. agrees: whether the output of a program, the first
    text, is the expected one. returns: the function of `megarl.rewards.inside.asserting` that compares what a function
    returned.
    """

    preamble: str = ""
    agrees: Callable[[str, str], bool] = lines_agree
    returns: str = "close"


PLAIN = Harness()
MODULES = "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys"
# names of a later module replace those of an earlier one, so the order is LiveCodeBench's (`import_string`)
LIVECODEBENCH = "\n".join(
    [
        *(f"from {name} import *" for name in f"{MODULES} json builtins typing".split()),
        f"import {', '.join(f'{MODULES} json'.split())}",
        "sys.setrecursionlimit(50000)",
    ]
)
HARNESSES = {
    "livecodebench": Harness(LIVECODEBENCH, lines_of_decimals_agree, "same_list"),
    "code_contests": Harness(agrees=words_agree),
}
