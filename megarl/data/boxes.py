r"""Finds ``\boxed{...}``, which marks the final answer in mathematical responses and in solutions of data sets."""

from __future__ import annotations

import re

# an empty box, or one before a word, is mentioned only: I gave it in \boxed as you asked
BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*\{(?!\s*\})|(?:\s+|(?=-?\.?\d))(?P<bare>(?!\{|[A-Za-z]{2})[^\s$]+))")
BRACE = re.compile(r"(?<!\\)[{}]")
BETWEEN = re.compile(r"(?:[\s$,;&]|\\[\\,;:!()\[\]]|\\q?quad|\\text\{\s*(?:and|or)?\s*\}|\b(?:and|or)\b)*")


def last_box(response: str) -> str | None:
    r"""The content of the last ``\boxed{...}``, ``\fbox{...}`` (with matching braces) or ``\boxed 42``; else None."""
    boxes = _boxes(response)
    return response[slice(*boxes[-1][2:])] if boxes else None


def joined_boxes(response: str) -> str | None:
    r"""The contents of the last boxes with nothing but commas, "and" or spacing between them: ``\boxed{1} and
    \boxed{2}`` is ``1, 2``; None if there are not several."""
    found: list[str] = []
    last = 0
    for start, end, *content in _boxes(response):
        if start >= last:  # else it is a box in a box
            between = BETWEEN.fullmatch(response, last, start)
            found = [*(found if between else ()), response[slice(*content)]]
            last = end
    return ", ".join(found) if len(found) > 1 else None


def _boxes(response: str) -> list[tuple[int, int, int, int]]:
    """Begin and end of each complete box and of its content. (The contents of boxes in boxes would be many copies.)"""
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
            found.append((*box.span(), *box.span("bare")))
        elif end := closing.get(box.end()):
            found.append((box.start(), end + 1, box.end(), end))
    return found
