r"""Finds ``\boxed{...}``, which marks the final answer in mathematical responses and in solutions of data sets."""

from __future__ import annotations

import re
from typing import NamedTuple

# an empty box, or one before a word, is mentioned only: I gave it in \boxed as you asked
BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*\{(?!\s*\})|(?:\s+|(?=-?\.?\d))(?P<bare>(?!\{|[A-Za-z]{2})[^\s$]+))")
BRACE = re.compile(r"(?<!\\)[{}]")
BETWEEN = re.compile(r"(?:[\s$,;&]|\\[\\,;:!()\[\]]|\\q?quad|\\text\{\s*(?:and|or)?\s*\}|\b(?:and|or)\b)*")


def last_box(response: str) -> str | None:
    r"""The content of the last ``\boxed{...}``, ``\fbox{...}`` (with matching braces) or ``\boxed 42``; else None."""
    boxes = _boxes(response)
    return response[boxes[-1].content] if boxes else None


def joined_boxes(response: str) -> str | None:
    r"""The contents of the last boxes with nothing but commas, "and" or spacing between them: ``\boxed{1} and
    \boxed{2}`` is ``1, 2``; None if there are not several."""
    found: list[str] = []
    last = 0
    for box in _boxes(response):
        if box.start >= last:  # else it is a box in a box
            content = response[box.content]
            found = [*found, content] if BETWEEN.fullmatch(response, last, box.start) else [content]
            last = box.end
    return ", ".join(found) if len(found) > 1 else None


class Box(NamedTuple):
    """Places in a response. (The contents of boxes in boxes in boxes would be many copies of it.)"""

    start: int
    end: int
    content: slice


def _boxes(response: str) -> list[Box]:
    """The complete boxes, as they begin."""
    boxes = list(BOX.finditer(response))
    closing: dict[int, int] = {}
    opened: list[int] = []
    for brace in BRACE.finditer(response, boxes[0].start()) if boxes else ():
        if brace[0] == "{":
            opened.append(brace.end())
        elif opened:
            closing[opened.pop()] = brace.start()
    found = []
    for box in boxes:
        if box["bare"]:
            found.append(Box(*box.span(), slice(*box.span("bare"))))
        elif end := closing.get(box.end()):
            found.append(Box(box.start(), end + 1, slice(box.end(), end)))
    return found
