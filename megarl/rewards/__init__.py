"""Verifiers: a response's text becomes a score, and the score becomes the reward. No response is ever run as code."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from megarl.data.prompts import Prompt, PromptSource
from megarl.errors import UserError
from megarl.recipe.names import VERIFIERS
from megarl.recipe.tables import Recipe, RewardTable


class Verifier(Protocol):
    def score(self, prompt: Prompt, response: str) -> float:
        """How right ``response`` is, in [0, 1]; 0 for garbage, and no exception because of its text but MemoryError.

        It may take as long, and as much memory, as the response makes it: `megarl.rewards.pool` has the limits.
        """
        ...


class VerifierModule(Protocol):
    """What the module of a verifier offers; the rest of megarl knows it by its line in `megarl.recipe.names`."""

    def check(self, recipe: Recipe) -> None:
        """`UserError` if the verifier cannot judge responses to the recipe's training or evaluation prompts."""

    def build(self, prompts: PromptSource) -> Verifier:
        """The verifier for all training and held-out prompts of ``prompts``."""
        ...


def is_scored(finish_reason: str, table: RewardTable) -> bool:
    """Whether a verifier reads a response at all.

    With ``table.require_stop`` one that did not end by itself (``finish_reason`` other than "stop") is wrong, whatever
    it says.
    """
    return finish_reason == "stop" or not table.require_stop


def reward(score: float, table: RewardTable) -> float:
    """1.0 for a right response, else 0.0.

    Verifiers may give partial credit (reasoning-gym's often do); only a score of ``table.correct_above`` or more
    counts.
    """
    return 1.0 if score >= table.correct_above else 0.0


def check_reward(recipe: Recipe) -> None:
    """`UserError` if the verifier that ``[reward] kind`` names does not suit the recipe's data."""
    _module(recipe).check(recipe)


def build_verifier(recipe: Recipe, prompts: PromptSource) -> Verifier:
    """The verifier that ``[reward] kind`` names, for the training and held-out prompts of ``prompts``."""
    return _module(recipe).build(prompts)


def _module(recipe: Recipe) -> VerifierModule:
    return cast(VerifierModule, importlib.import_module(VERIFIERS[recipe.reward.kind]))


def right_answer(prompt: Prompt) -> str:
    """The answer to compare with; `UserError` where a generator names none, because only its own scorer can judge."""
    if not prompt.answer:
        raise UserError(f'prompt {prompt.text[:60]!r} names no answer; use reward.kind = "reasoning_gym"')
    return prompt.answer
