"""Text that a model wrote, made harmless for a terminal."""

from __future__ import annotations

import unicodedata

SHOWN = 1200  # characters of a text that is cut: this many at most, half of them from its end
_JOINERS = "\u200c\u200d"  # which scripts and emoji need, and which move nothing


def escape(text: str, newlines: bool = True) -> str:
    r"""``text`` with whatever could drive a terminal or change the order of what it shows written as an escape.

    Control characters (the C1 set too), formatting such as directions, separators of lines, and what is no character
    become ``\x1b`` or ``\u202e``. newlines: leave line feeds and tabs as they are.
    """
    return "".join(_escaped(c, newlines) for c in text) if _needs_it(text) else text


def _needs_it(text: str) -> bool:
    return not (text.isascii() and text.isprintable())


def _escaped(character: str, newlines: bool) -> str:
    if newlines and character in "\n\t":
        return character
    category = unicodedata.category(character)
    if character in _JOINERS or category not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    return character.encode("unicode_escape").decode()


def shorten(text: str, longest: int = SHOWN) -> str:
    """Beginning and end of a text that is longer."""
    left_out = len(text) - longest
    if left_out <= 0:
        return text
    half = longest // 2
    return f"{text[:half]}\n[... {left_out:,} characters ...]\n{text[-half:]}"
