"""Of many like cases, ``make test`` and the gate take a few that differ in kind, ``make test-slow`` takes all."""

from __future__ import annotations

import os
from collections.abc import Iterable

EVERY = "MEGARL_EVERY" in os.environ


def few(cases: Iterable[str], *chosen: str) -> tuple[str, ...]:
    cases = tuple(cases)
    assert set(chosen) <= set(cases)
    return tuple(case for case in cases if EVERY or case in chosen)
