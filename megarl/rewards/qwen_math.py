"""The scorer of Qwen2.5-Math's evaluation, as it behaves on its "math" suites.

github.com/QwenLM/Qwen2.5-Math, evaluation/parser.py and grader.py. Numbers may differ by 1e-4 of their value, and by a
factor of 100; 1/3 and .3333 are equal.
"""

from __future__ import annotations

import re

from megarl.rewards import comparing
from megarl.rewards.lenient import equal, layout_free, same_value

MINERVA = re.compile(r"final answer is \$(.*?)\$\. I hope", re.DOTALL)
NUMBER = re.compile(r"-?\d*\.?\d+")
CHOICE = re.compile(r"\b[A-E]\b")
STOP = re.compile(r"(?<!\d)\.(?!\d)")  # the original's parser of formulas reads up to a dot that is not of a number
UNIT = re.compile(r"(?<!^)\\text\{[^}]*\}$")
NAME = re.compile(r"[xyz](?:=|\\in(?![a-z])|\\to(?![a-z]))")
ZEROS = re.compile(r"(\d)\.0*(?=\D|$)")


def accepts(response: str, right: str) -> bool:
    """Whether the answer of a response is ``right``; of a letter, only its last one counts."""
    found, right = answer(response), normalised(right)
    if len(right) == 1 and right in "ABCDE" and CHOICE.findall(found.upper())[-1:] == [right]:
        return True
    return agree(found, right)


check, build = comparing(accepts)


def answer(response: str) -> str:
    """The normalised answer of a response: of its last box, else after "the answer is", else its last number."""
    if minerva := MINERVA.search(response):
        found = minerva[1]
    elif "boxed" in response:
        found = _box(response.rpartition("boxed")[2])
    elif "he answer is" in response:
        found = STOP.split(response.rpartition("he answer is")[2].replace("$", ""))[0]
    else:
        found = (NUMBER.findall(response.replace(",", "")) or [""])[-1]
    return normalised(re.sub(r"\n\s*", "", found).strip().removeprefix(":").removesuffix(".").removesuffix("/"))


def agree(found: str, right: str) -> bool:
    """Whether two normalised answers are equal; an equation also equals a multiple by -1, and, if only one is an
    equation whose left side is a name, its right side is compared."""
    sides = [found.split("="), right.split("=")]
    if len(sides[0]) == len(sides[1]) == 2:
        differences = [f"{left}-({value})" for left, value in sides]
        signs = (differences[0], f"-({differences[0]})")
        return found.lower() == right.lower() or any(equal(each, differences[1], same_value) for each in signs)
    for side, other in ((sides[0], sides[1]), (sides[1], sides[0])):
        if len(side) == 2 and len(side[0]) <= 2 and len(other) == 1:
            side[:] = side[1:]
    return equal("=".join(sides[0]), "=".join(sides[1]), same_value)


def normalised(text: str) -> str:
    """The text that is compared."""
    text = UNIT.sub("", text.strip().rstrip(".").replace("\\{", "{").replace("\\}", "}")).strip()
    text = re.sub(r"\\begin\{array\}\{.*?\}|\\begin\{bmatrix\}", r"\\begin{pmatrix}", text)
    text = re.sub(r"\\end\{(?:array|bmatrix)\}", r"\\end{pmatrix}", text)
    text = re.sub(r"\\(n|l|g)eq(?![a-z])", r"\\\1e", text)
    text = re.sub(r"\\text\{(.*?)\}", r"\1", text).replace("\\(", "").replace("\\)", "").replace("\\mathbf", "")
    text = NAME.sub("", layout_free(text).replace("$", "").replace("and", ""))
    return ZEROS.sub(r"\1", text)


def _box(text: str) -> str:
    """What follows "boxed": the content of the braces, or the text up to the next dollar sign."""
    if not text.startswith("{"):
        return text.partition("$")[0]
    depth = 0
    for at, char in enumerate(text):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if not depth:
            return text[1:at]
    return text[1:]
