"""How far tests go where a promise has many like cases: to a few that differ in kind, or through all of them.

The gate and ``make test`` take the few, ``make test-slow`` takes all (`MEGARL_EVERY`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable

EVERY = "MEGARL_EVERY" in os.environ


def few(cases: Iterable[str], *chosen: str) -> tuple[str, ...]:
    """All cases, or the chosen ones of them, in the order of all."""
    cases = tuple(cases)
    assert set(chosen) <= set(cases)
    return tuple(case for case in cases if EVERY or case in chosen)
