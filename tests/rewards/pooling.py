"""Prompts, and verdicts on responses to them by a pool of their own."""

import contextlib
import importlib
import json
from pathlib import Path

import pytest

from megarl.data.prompts import Prompt
from megarl.data.sources import GymItems
from megarl.recipe.names import VERIFIERS
from megarl.recipe.tables import RewardTable
from megarl.rewards.pool import Limits, VerifierPool
from megarl.rewards.reasoning_gym import ReasoningGym

TIGHT = Limits(seconds=0.5, memory=1 << 30, workers=2)


def rows_of(name):
    """The rows of a file beside this one: JSON lines, among which comments begin with #."""
    lines = Path(__file__).parent.joinpath(name).read_text().splitlines()
    return [json.loads(line) for line in lines if not line.startswith("#")]


def prompt_for(answer="", **columns):
    """A prompt with this answer, whose row has these columns too."""
    return Prompt(0, "?", (1,), answer, {"metadata": columns})


def scorer(kind):
    """The verifier of this kind, with its default settings."""
    return importlib.import_module(VERIFIERS[kind]).build(RewardTable(kind=kind), None)


def generated(names, count=1):
    """{generator: prompts of its items}, and the verifier of them all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        sources = {name: GymItems(name, {}) for name in names}
        items = {name: [each.train(0, number, 0) for number in range(count)] for name, each in sources.items()}
    prompts = {name: [Prompt(0, "?", (1,), str(item["answer"]), item) for item in own] for name, own in items.items()}
    return prompts, ReasoningGym({name: each.scorer for name, each in sources.items()})


def pool(build, limits=TIGHT):
    return contextlib.closing(VerifierPool(build, limits))


def score(verifiers, questions):
    """The verdicts on (prompt, response) pairs, in their order."""
    numbers, found = [verifiers.ask(*question)[0] for question in questions], {}
    while len(found) < len(numbers):
        found |= dict(verifiers.verdicts(wait=True))
    return [found[number] for number in numbers]


def scored(build, limits, questions):
    """`score` in a new pool."""
    with pool(build, limits) as verifiers:
        return score(verifiers, questions)
