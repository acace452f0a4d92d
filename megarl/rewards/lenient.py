"""What the scorers ``prime_math`` and ``qwen_math`` share: a comparison that forgives layout, percent and rounding."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import isclose
from typing import Any

TOLERANCE = 1e-4  # relative; also of values that differ by a factor of 100, as percentages may
LONGEST = 1000  # characters of an answer that are compared as mathematics
LAYOUT = re.compile(r"\\(?:left|right|!|,|;)|\n|\^\{?\\circ\}?|\\\$|\\?%")
BRACKETS = str.maketrans("", "", "{}()")


def layout_free(text: str) -> str:
    r"""The text without spacing, percent and degree signs and \$; \frac12, 1/2 and \dfrac{1}{2} as \frac{1}{2}."""
    text = re.sub(r"[td]frac", "frac", LAYOUT.sub("", text))
    text = re.sub(r"(^| |\{)\.", r"\g<1>0.", text).replace(" ", "")
    text = re.sub(r"\\sqrt(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac([^{}\\])([^{}\\])", r"\\frac{\1}{\2}", text)
    return re.sub(r"(-?\d+)/(-?\d+)", r"\\frac{\1}{\2}", text) if re.fullmatch(r"-?\d+/-?\d+", text) else text


def number(text: str) -> float | None:
    """The value of a decimal number with or without commas, else None."""
    try:
        return float(text.replace("{,}", "").replace(",", ""))
    except ValueError:
        return None


def equal(answer: str, right: str, same: Callable[[str, str], bool]) -> bool:
    """Whether two answers are the same text but for brackets and case, close numbers, lists of equal parts in the same
    order, or else ``same``."""
    answer, right = answer.strip()[:LONGEST], right.strip()
    if answer.lower() == right.lower():
        return True
    found, expected = number(answer), number(right)
    if found is not None and expected is not None:
        return any(isclose(value, found, rel_tol=TOLERANCE) for value in (expected / 100, expected, expected * 100))
    if not answer or not right:
        return False
    if _bare(answer, right) == _bare(right, answer):
        return True
    parts = [_parts(answer), _parts(right)]
    if len(parts[0]) == len(parts[1]) > 1 and (answer[0] in "([") == (right[0] in "(["):
        return all(equal(one, other, same) for one, other in zip(*parts, strict=True))
    return same(answer, right)


def _bare(text: str, other: str) -> str:
    """Without brackets, but (1,2) and [1,2] stay different."""
    crossed = {text[0], other[0]} == set("([")
    return (text if crossed else text.strip("[]()")).translate(BRACKETS).replace(" ", "").lower()


def _parts(text: str) -> list[str]:
    inner = text[1:-1] if text[0] in "([" and text[-1] in ")]" else text
    return inner.split(",")


def same_value(answer: str, right: str) -> bool:
    """Whether two formulas in LaTeX have equal values; raises what SymPy raises where it cannot read them."""
    from math_verify.parser import latex2sympy  # which does not evaluate Python
    from sympy import N, simplify

    values: list[Any] = [latex2sympy(text) for text in (answer, right)]
    if values[0] == values[1]:
        return True
    try:
        if isclose(N(values[0]), N(values[1]), rel_tol=TOLERANCE):
            return True
    except (TypeError, AttributeError):  # not numbers
        pass
    return bool(simplify(values[0] - values[1]) == 0)
