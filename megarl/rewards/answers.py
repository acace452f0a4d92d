"""Extracts the final answer of a response as text, to compare the responses to a prompt with each other for maj@k.

Answers are compared as text, not by the verifier: 0.5 and 1/2 are different answers. For right responses this makes no
difference, since they are known to agree; equal wrong answers that are written differently count as several.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from megarl.data.boxes import last_box
from megarl.rewards import dapo, prime_math, qwen_math
from megarl.rewards.math import bare, chosen

LONGEST = 1000  # characters after which an answer is cut
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
DRESSING = re.compile(r"[\s$]|\\text")


def in_box(response: str) -> str:
    """The answer in the last box of a response, else the label of the choice that it names, else its last number."""
    text = response.rpartition("</think>")[2] or response
    if (boxed := last_box(text)) is None:
        boxed = chosen(text) or (NUMBER.findall(text[-LONGEST:]) or [""])[-1]
    return DRESSING.sub("", bare(boxed[:LONGEST]))


# the kinds of verifiers whose responses have a short final answer, and what finds it
COMPARED: dict[str, Callable[[str], str | None]] = {
    "exact": str.strip,
    "reasoning_gym": str.strip,
    "math": in_box,
    "dapo": dapo.answer,
    "prime_math": prime_math.answer,
    "qwen_math": qwen_math.answer,
}


def answer_of(kind: str, response: str) -> str | None:
    """The answer of a response to a verifier of this ``kind``; None if it has none, or kind is not in `COMPARED`."""
    find = COMPARED.get(kind)
    return (find and (find(response) or "")[:LONGEST]) or None
