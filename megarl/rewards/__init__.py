"""Verifiers: a response's text becomes a score, and a score becomes the reward. No response is ever run as code."""

from __future__ import annotations

from typing import Protocol

from megarl.data.prompts import Prompt, PromptSource
from megarl.errors import UserError
from megarl.recipe.tables import Recipe, RewardTable


class Verifier(Protocol):
    def score(self, prompt: Prompt, response: str) -> float:
        """How right ``response`` is, in [0, 1]; 0 for garbage, never an exception because of what it holds."""
        ...


def reward(verifier: Verifier, prompt: Prompt, text: str, finish_reason: str, table: RewardTable) -> float:
    """1.0 for a right response, else 0.0.

    Verifiers may give partial credit (reasoning-gym's often do); only a score of ``table.correct_above`` or more
    counts. With ``table.require_stop`` a response that did not end by itself (``finish_reason`` other than "stop") is
    wrong unread.
    """
    if table.require_stop and finish_reason != "stop":
        return 0.0
    return 1.0 if verifier.score(prompt, text) >= table.correct_above else 0.0


def build_verifier(recipe: Recipe, prompts: PromptSource) -> Verifier:
    """The verifier that ``[reward] kind`` names; it can score every training and held-out prompt of ``prompts``."""
    match recipe.reward.kind:
        case "reasoning_gym":
            from megarl.rewards.reasoning_gym import ReasoningGym

            if recipe.eval.every and recipe.eval.source == "file":
                raise UserError(
                    'reward.kind = "reasoning_gym" cannot score eval.source = "file"; use "exact" or "math"'
                )
            return ReasoningGym(prompts.scorers)
        case "math":
            from megarl.rewards.math import Math

            return Math()
        case _:
            from megarl.rewards.exact import Exact

            return Exact()


def right_answer(prompt: Prompt) -> str:
    """The answer to compare with. A generator that accepts many may name none: only its own scorer can judge."""
    if not prompt.answer:
        raise UserError(f'prompt {prompt.text[:60]!r} names no answer; use reward.kind = "reasoning_gym"')
    return prompt.answer
