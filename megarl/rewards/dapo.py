"""The scorer of DAPO's experiments: the text after the last "Answer:" is, normalised, the text of the reference answer.

Its behaviour is that of verl's ``math_dapo`` up to version 0.8 (github.com/volcengine/verl,
verl/utils/reward_score/math_dapo.py), whose normalisation is the one of the Minerva paper (arXiv:2206.14858, appendix
D.1). It compares texts, not mathematics: 1/2 is not 0.5, and a dot after the answer makes it wrong. From 0.9 on verl's
takes a box of a response that has no "Answer:".
"""

from __future__ import annotations

import re

from megarl.rewards import comparing

LAST = 300  # characters of a response that are read
ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
LETTERS = re.compile(r"an? |\\\$|\\ | ")  # articles, dollar signs and spaces
WORDS = re.compile(
    "square|ways|integers|dollars|mph|inches|hours|km|units|sue|points|feet|minutes|digits|cents|degrees|cm|gm|pounds"
    "|meters|meals|edges|students|childrentickets|multiples"
)
MARKS = re.compile(
    r"\\l?dots|\\text\{[s.]?\}(?:\^[23])?|\\mathrm\{th\}|\^\\circ|\^\{\\circ\}|\\;|,\\!|\{,\}|\""
)  # units and signs that say nothing about the value
FORMULA = re.compile(r".*?\$(.*?)\$.*")
STYLE = re.compile(r"\\(?:text|textbf|overline)\{(.*?)\}")


def accepts(response: str, right: str) -> bool:
    """Whether the answer of a response is ``right``."""
    return answer(response) == normalised(right)


check, build = comparing(accepts)


def answer(response: str) -> str | None:
    """The normalised answer at the end of a response; None without "Answer:"."""
    found = ANSWER.findall(response[-LAST:])
    return normalised(found[-1]) if found else None


def normalised(text: str) -> str:
    """The text that is compared: what follows the last "=", without units and layout."""
    text = LETTERS.sub("", text.rpartition("=")[2].replace(".$", "$"))
    text = re.sub(r",?\\text\{and\}", ",", text.replace("mbox", "text")).replace("\\text{m}", "")
    text = MARKS.sub("", WORDS.sub("", text))
    text = STYLE.sub(r"\1", FORMULA.sub(r"$\1$", text))
    text = re.sub(r"\\boxed\{(.*)\}", r"\1", text)
    # \frac12 is \frac{1}{2}, and \sqrt2 is \sqrt{2}
    text = re.sub(r"sqrt([^{])", r"sqrt{\1}", re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", text)).replace("$", "")
    digits = text.replace(",", "")
    return digits if digits.isdigit() else text.strip()
