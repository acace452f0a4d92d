"""Which training prompts are also in an examination: word for word, or in 13 words that follow each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

WORDS = 13  # n of the n-grams, and the next constant: GPT-3 (arXiv:2005.14165), appendix C
COMMON = 10  # training prompts beyond which an n-gram is a common phrase, such as an instruction, and no overlap
WORD = re.compile(r"\w+")


def normalized(text: str) -> str:
    """A text in lower case with single spaces; its signs stay, since 2 + 2 is not 2 - 2."""
    return " ".join(text.lower().split())


def repeated(texts: Iterable[str]) -> int:
    """How many of the texts are, as `normalized`, one that came before."""
    found = [normalized(text) for text in texts]
    return len(found) - len(set(found))


def overlapping(train: Sequence[str], exam: Sequence[str]) -> tuple[list[int], list[int]]:
    """Positions in ``train`` of texts that are one of ``exam`` as `normalized`, and of others that share an n-gram of
    words with one. Of the latter, repetitions in ``train`` count once."""
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
    often = Counter(gram for found in shared.values() for gram in found)
    return exact, [n for n, found in shared.items() if any(often[gram] <= COMMON for gram in found)]


def _grams(text: str) -> Iterable[tuple[str, ...]]:
    words = WORD.findall(text.lower())
    return (tuple(words[start : start + WORDS]) for start in range(len(words) - WORDS + 1))
