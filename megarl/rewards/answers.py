"""What a response gives as its answer, by which the responses to a prompt are compared with each other: maj@k.

The text decides, not the verifier: 0.5 and 1/2 are two answers. Among right responses that makes no difference, since
these are known to agree; wrong ones that are the same but look different count as several.
"""

from __future__ import annotations

import re

from megarl.data.boxes import BOX, last_box

COMPARED = ("exact", "math", "reasoning_gym")  # verifiers of short answers; programs have none to compare
LONGEST = 1000  # characters of an answer
BOXES = 8  # of a response that are looked at, from the last one on
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
DRESSING = re.compile(r"[\s$]|\\[,;!]|\\left|\\right|\\text")


def answer_of(kind: str, response: str) -> str | None:
    """The answer of a response under ``reward.kind``; None where it gives none, or the kind compares none."""
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
