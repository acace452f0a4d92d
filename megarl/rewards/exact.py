"""The verifier for exact answers: response and answer must be equal, except for white space around them."""

from __future__ import annotations

import functools

from megarl.rewards import Comparing, comparing


def accepts(response: str, right: str) -> bool:
    """Whether a response is this answer."""
    return response.strip() == right.strip()


check, build = comparing(accepts)
Exact = functools.partial(Comparing, accepts)  # the verifier itself, for programs that score without a recipe
