"""The verifier for exact answers: response and answer must be equal, except for white space around them."""

from __future__ import annotations

from megarl.rewards import comparing


def accepts(response: str, right: str) -> bool:
    """Whether a response is this answer."""
    return response.strip() == right.strip()


check, build = comparing(accepts)
