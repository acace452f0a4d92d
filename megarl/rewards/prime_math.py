"""The scorer of PRIME, which verl uses for several mathematical data sets.

github.com/volcengine/verl, verl/utils/reward_score/prime_math, where verl's own dependencies are installed, with which
SymPy cannot parse LaTeX there. It searches a whole response for the answer, with or without a box. The answer is right
as text, either without layout or as one would type it; if numbers agree to 1e-4 or are percentages of each other; or if
SymPy says so, which is asked about formulas of at most two letters without powers in braces.
"""

from __future__ import annotations

import re

from megarl.data.boxes import last_box
from megarl.rewards import comparing
from megarl.rewards.lenient import LONGEST, equal, layout_free, same_value

BEFORE = ("answer:", "answer is", "answers are")
AFTER = ("is answer", "is the answer", "are answers", "are the answers")
SAYS = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")
UNIT = re.compile(
    r"(?:degree|(?:centi)?meter|cm|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard|liter)"
    r"(?:es)?s? *(?:\^\d+)?|\^ *\\circ"
)
NAME = re.compile(r"^.{0,2}=(?=[^=]*$)")
# LaTeX as one would type it
TYPED = (
    (re.compile(r"\\[td]?frac"), r" \\frac"),  # 6\frac23 is 6 2/3
    (re.compile(r"\\frac *(?:(\d)|\{(.*?)\}) *(?=\d|\{)"), r"\1\2/"),
    (re.compile(r"\\sqrt *(?:(\w)|\{(.*?)\})"), r"sqrt(\1\2)"),
    (re.compile(r"\\(?:cdot|times) *"), "*"),
    (re.compile(r"\\(?:left|right|text|mathrm|mathbf|mbox|displaystyle)(?![a-zA-Z]) *|[{}]"), ""),
    (re.compile(r"\\[,;:! ]|\\q?quad *"), " "),
    (re.compile(r"\\([a-zA-Z]+) *"), r"\1"),
)
INVOLVED = re.compile(r"\^[{(]|\^\d+\^|\^\d\d")
FRACTION = re.compile(r"-?\d+.?/0*[1-9]\d*.?")
PYTHON = re.compile(r"(?!.*\d *[A-Za-z(])[\w\s+\-*/().]+")
INTEGER_AND_DOT = re.compile(r"(?<![\w.])(?<!\de[-+])\d+\.$")
LONG_NAMES = re.compile(r"sqrt|frac")


def accepts(response: str, right: str) -> bool:
    """Whether the answer of a response is ``right``."""
    found = extracted(response)
    if normalised(found) == normalised(right):
        return True
    found = found[:LONGEST]
    plain, plain_right = typed(found), typed(right)
    if plain == plain_right or not plain:
        return plain == plain_right
    if _asks_sympy(plain, plain_right) and same_value(_formula(found).rstrip("."), _formula(right)):
        return True
    return equal(found, right, _same_number)


check, build = comparing(accepts)


def answer(response: str) -> str:
    """The normalised answer of a response."""
    return normalised(extracted(response)).replace("$", "")


def extracted(response: str) -> str:
    """What stands after "answer is", in the last box, and after the last "is" or "="."""
    for phrase in BEFORE:
        response = _after(response, phrase)
    for phrase in AFTER:
        at = response.lower().rfind(phrase)
        response = response if at < 0 else response[:at].strip()
    response = last_box(response) or response
    response = response.rpartition(". ")[0].strip() or response
    for phrase in SAYS:
        response = _after(response, phrase)
    return response


def normalised(text: str) -> str:
    """The text without layout."""
    text = re.sub(r"^\\text\{(.+?)\}$", r"\1", text.strip())
    return NAME.sub("", layout_free(re.sub(r"\\text\{ .*", "", text)))


def typed(text: str) -> str:
    """The text as one would type it: 3/4 for \\frac{3}{4}, without units and commas of thousands, in small letters."""
    text = re.sub(r"^\\text\{(.+?)\}$", r"\1", text)
    text = UNIT.sub("", re.sub(r"\\?[$%]", "", text))
    text = re.sub(r" (?:or|and) ", " , ", text)
    text = re.sub(r",\\! *", "", text[1:-1] if text.startswith("{") and text.endswith("}") else text)
    if "\\" in text:
        for latex, plain in TYPED:
            text = latex.sub(plain, text)
        text = text.strip()
    text = re.sub(r"(\d) +(?=\d)", r"\1+", re.sub(r"- *", "-", text)).lower()
    number = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", text)
    return str(int(float(number))) if _is_integer(number) else text


def _formula(text: str) -> str:
    """LaTeX without dollars and units."""
    return UNIT.sub("", text.replace("$", "")).strip()


def _is_integer(text: str) -> bool:
    return bool(re.fullmatch(r"\s*-?\d{1,300}(\.0*)?\s*", text))


def _asks_sympy(found: str, right: str) -> bool:
    """Whether the original compares the values of two typed texts."""
    letters = set(re.findall("[^\\W\\d_]", LONG_NAMES.sub("", found + right)))
    if len(letters) > 2 or "," in found + right or INVOLVED.search(f"{found} {right}") or not _ends(found, right):
        return False
    fractions = FRACTION.fullmatch(found) and FRACTION.fullmatch(right)
    return not fractions and _is_integer(found) == _is_integer(right)


def _ends(*texts: str) -> bool:
    """Whether Python can read the ends: a dot stands after an integer only."""
    return all(not text.endswith(".") or INTEGER_AND_DOT.search(text) for text in texts)


def _same_number(found: str, right: str) -> bool:
    """`same_value` of what Python can read, too; LaTeX is not."""
    readable = PYTHON.fullmatch(found) and PYTHON.fullmatch(right) and _ends(found, right)
    return bool(readable) and same_value(found.rstrip("."), right)


def _after(text: str, phrase: str) -> str:
    at = text.lower().rfind(phrase)
    return text if at < 0 else text[at + len(phrase) :].strip()
