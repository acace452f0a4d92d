"""Prompts, and verdicts on responses to them by a pool of their own."""

import contextlib

from megarl.data.prompts import Prompt
from megarl.rewards.pool import VerifierPool


def prompt_for(answer="", **columns):
    """A prompt with this answer, whose row has these columns too."""
    return Prompt(0, "?", (1,), answer, {"metadata": columns})


@contextlib.contextmanager
def pool(build, limits):
    verifiers = VerifierPool(build, limits)
    try:
        yield verifiers
    finally:
        verifiers.close()


def score(verifiers, questions):
    """The verdicts on (prompt, response) pairs, in their order."""
    numbers, found = [verifiers.ask(*question) for question in questions], {}
    while len(found) < len(numbers):
        found |= dict(verifiers.verdicts(wait=True))
    return [found[number] for number in numbers]


def scored(build, limits, questions):
    """`score` in a new pool."""
    with pool(build, limits) as verifiers:
        return score(verifiers, questions)
