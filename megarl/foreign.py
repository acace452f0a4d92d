"""Reads text and numbers that come from outside, and makes text safe to print.

What agents, services, other systems' files and people's recipes contain is bounded here before anything else uses it:
size, depth, digits and the range of rewards.
"""

from __future__ import annotations

import json
import shlex
import tomllib
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

LARGEST = 1e6  # of a reward or score, in absolute value: advantages stay far from the limits of float32
LONGEST_INTEGER = 1 << 63  # integers must be smaller, as in every binary format
DEEPEST = 64  # lists and objects inside each other; more would exhaust the stack of whatever copies or prints them
MAX_FILE = 16 << 20  # most bytes of a configuration file
_JOINERS = "\u200c\u200d"  # harmless formatting characters that some scripts and emoji need


def bounded(value: Any) -> float:
    """A reward or a score from outside; ValueError unless it is a finite number of at most `LARGEST`."""
    if isinstance(value, bool | int | float) and -LARGEST <= value <= LARGEST:
        return float(value)
    raise ValueError(f"is {shown(value)}, expected a finite number of at most {LARGEST:,.0f}, with either sign")


def shown(value: Any) -> str:
    """The beginning of ``value`` as Python writes it, for messages."""
    try:
        return f"{value!r:.60}"
    except (ValueError, RecursionError):  # Python writes no integers of thousands of digits
        return f"a {type(value).__name__} that is too large to show"


def quoted(value: object) -> str:
    """``value``, such as a path, as one word of a printed command, which people paste into a shell."""
    text = str(value)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)  # else it would be an option


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError, in one line, if it is malformed or beyond the limits of this module."""
    return _parsed(json.loads, text)


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text; ValueError as from `parse_json`."""
    return _parsed(tomllib.loads, text)


def _parsed(parse: Callable[[Any], Any], text: Any) -> Any:
    try:
        found = parse(text)
    except RecursionError:
        raise ValueError(f"lists or objects are nested more than {DEEPEST} deep") from None
    level, depth = [found], 0
    while level:
        inside: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inside += [*value, *value.values()]
            elif isinstance(value, list):
                inside += value
            elif isinstance(value, int) and abs(value) >= LONGEST_INTEGER:
                raise ValueError("an integer does not fit into 64 bits")
            elif isinstance(value, str) and not value.isascii():
                value.encode()  # UnicodeEncodeError, a ValueError, for half of a surrogate pair, which JSON can spell
        level, depth = inside, depth + 1
        if depth > DEEPEST:
            raise ValueError(f"lists or objects are nested more than {DEEPEST} deep")
    return found


def read_file(path: Path) -> str:
    """The text of a configuration file; ValueError if it is larger than `MAX_FILE` or not UTF-8."""
    with open(path, "rb") as file:
        data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise ValueError(f"it is larger than {MAX_FILE >> 20} MiB")
    return data.decode("utf-8-sig")  # editors of Windows begin files with a mark of the byte order


def escape(text: str, newlines: bool = True) -> str:
    r"""``text`` with everything written as escapes that could control a terminal or change the order of its text.

    Control characters (also of the C1 set), formatting such as directions, line separators, and surrogates become
    escapes such as ``\x1b`` or ``\u202e``. newlines: leave line feeds and tabs as they are.
    """
    return text if text.isascii() and text.isprintable() else "".join(_escaped(c, newlines) for c in text)


def _escaped(character: str, newlines: bool) -> str:
    if newlines and character in "\n\t":
        return character
    category = unicodedata.category(character)
    if character in _JOINERS or category not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return character
    return character.encode("unicode_escape").decode()
