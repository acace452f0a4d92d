"""Finds training prompts that are also held-out prompts, or share 13 consecutive words with one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

# both constants are from GPT-3 (arXiv:2005.14165), appendix C
WORDS = 13  # length of the n-grams
COMMON = 10  # an n-gram in more training prompts than this is a common phrase, such as an instruction, not an overlap
WORD = re.compile(r"\w+")


def normalized(text: str) -> str:
    """A text in lower case with single spaces. Punctuation stays, since 2 + 2 is not 2 - 2."""
    return " ".join(text.lower().split())


def repeated(texts: Iterable[str]) -> int:
    """How many of the texts repeat an earlier one, after `normalized`."""
    found = [normalized(text) for text in texts]
    return len(found) - len(set(found))


def overlapping(train: Sequence[str], exam: Sequence[str]) -> tuple[list[int], list[int]]:
    """Positions in ``train`` of texts that are in ``exam`` after `normalized`, and of others that share an n-gram.

    Of the latter only the first of equal texts in ``train`` is listed.
    """
    whole = {normalized(text) for text in exam}
    grams = {gram for text in exam for gram in _grams(text)}
    exact: list[int] = []
    shared: dict[int, set[tuple[str, ...]]] = {}
    seen: set[str] = set()
    for position, text in enumerate(train):
        plain = normalized(text)
        if plain in whole:
            exact.append(position)
        elif plain not in seen and (found := {gram for gram in _grams(text) if gram in grams}):
            shared[position] = found
        seen.add(plain)
    counts = Counter(gram for found in shared.values() for gram in found)
    return exact, [n for n, found in shared.items() if any(counts[gram] <= COMMON for gram in found)]


def _grams(text: str) -> Iterable[tuple[str, ...]]:
    words = WORD.findall(text.lower())
    return (tuple(words[start : start + WORDS]) for start in range(len(words) - WORDS + 1))
