r"""Finds ``\boxed{...}``, which marks the final answer in mathematical responses and in solutions of data sets."""

from __future__ import annotations

import re

BOX = re.compile(r"\\(?:boxed|fbox)(?:\s*\{|\s+(?P<bare>[^\s$]+))")


def last_box(response: str) -> str | None:
    r"""The content of the last ``\boxed{...}``, ``\fbox{...}`` (with matching braces) or ``\boxed 42``; else None."""
    for match in reversed(list(BOX.finditer(response))):
        if match["bare"]:
            return match["bare"]
        depth = 1
        for at in range(match.end(), len(response)):
            depth += {"{": 1, "}": -1}.get(response[at], 0) if response[at - 1] != "\\" else 0
            if not depth:
                return response[match.end() : at]
    return None
