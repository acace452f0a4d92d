"""Text for a terminal: what a model wrote is made harmless, and tables are aligned."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence

SHOWN = 1200  # characters that are left of a long text, half of them from its end
_JOINERS = "\u200c\u200d"  # harmless formatting characters that some scripts and emoji need


def escape(text: str, newlines: bool = True) -> str:
    r"""``text`` with everything written as escapes that could control a terminal or change the order of its text.

    Control characters (also of the C1 set), formatting such as directions, line separators, and surrogates become
    escapes such as ``\x1b`` or ``\u202e``. newlines: leave line feeds and tabs as they are.
    """
    return "".join(_escaped(c, newlines) for c in text) if _may_need_escapes(text) else text


def _may_need_escapes(text: str) -> bool:
    return not (text.isascii() and text.isprintable())


def _escaped(character: str, newlines: bool) -> str:
    if newlines and character in "\n\t":
        return character
    category = unicodedata.category(character)
    if character in _JOINERS or category not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    return character.encode("unicode_escape").decode()


def shorten(text: str, longest: int = SHOWN) -> str:
    """``text`` without its middle if it has more than ``longest`` characters."""
    left_out = len(text) - longest
    if left_out <= 0:
        return text
    half = longest // 2
    return f"{text[:half]}\n[... {left_out:,} characters ...]\n{text[-half:]}"


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = (), gap: str = "  ") -> list[str]:
    """A line for each row, with cells below each other; the columns ``right`` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        gap.join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
