"""Extracts the final answer of a response as text, to compare the responses to a prompt with each other for maj@k.

Answers are compared as text, not by the verifier: 0.5 and 1/2 are different answers. For right responses this makes no
difference, since they are known to agree; equal wrong answers that are written differently count as several.
"""

from __future__ import annotations

import re

from megarl.data.boxes import BOX, last_box

COMPARED = ("exact", "math", "reasoning_gym")  # kinds of verifiers whose responses have a short final answer
LONGEST = 1000  # characters after which an answer is cut
BOXES = 8  # the last boxes of a response, among which the last complete one is its answer
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
DRESSING = re.compile(r"[\s$]|\\[,;!]|\\left|\\right|\\text")


def answer_of(kind: str, response: str) -> str | None:
    """The answer of a response to a verifier of this ``kind``; None if it has none, or kind is not in `COMPARED`."""
    if kind not in COMPARED:
        return None
    if kind != "math":
        return response.strip()[:LONGEST] or None
    boxes = [match.start() for match in BOX.finditer(response)][-BOXES:]
    boxed = last_box(response[boxes[0] :]) if boxes else None
    if boxed is None:
        numbers = NUMBER.findall(response[-LONGEST:])
        boxed = numbers[-1] if numbers else ""
    return DRESSING.sub("", boxed).rstrip(".")[:LONGEST] or None
