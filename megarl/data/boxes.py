r"""Finds ``\boxed{...}``, which marks the final answer in mathematical responses and in solutions of data sets."""

from __future__ import annotations

import re

BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|(?:\s+|(?=-?\.?\d))(?P<bare>[^\s$]+))")
BETWEEN = re.compile(r"(?:[\s$,;&]|\\[\\,;:!()\[\]]|\\q?quad|\\text\{\s*(?:and|or)?\s*\}|\b(?:and|or)\b)*")


def last_box(response: str) -> str | None:
    r"""The content of the last ``\boxed{...}``, ``\fbox{...}`` (with matching braces) or ``\boxed 42``; else None."""
    for match in reversed(list(BOX.finditer(response))):
        content = _content(response, match)
        if content is not None:
            return content
    return None


def joined_boxes(response: str) -> str | None:
    r"""The contents of the last boxes with nothing but commas, "and" or spacing between them: ``\boxed{1} and
    \boxed{2}`` is ``1, 2``; None if there are not several."""
    found: list[str] = []
    end = 0
    for match in BOX.finditer(response):
        content = _content(response, match) if match.start() >= end else None  # else a box in a box
        if content is None:
            continue
        if not BETWEEN.fullmatch(response, end, match.start()):
            found = []
        found.append(content)
        end = match.end() if match["bare"] else match.end() + len(content) + 1
    return ", ".join(found) if len(found) > 1 else None


def _content(response: str, match: re.Match[str]) -> str | None:
    if match["bare"]:
        return match["bare"]
    depth = 1
    for at in range(match.end(), len(response)):
        depth += {"{": 1, "}": -1}.get(response[at], 0) if response[at - 1] != "\\" else 0
        if not depth:
            return response[match.end() : at]
    return None
