"""The reward of a recipe: the weighted sum of the verifier's reward and ``[[reward.parts]]``."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from megarl.data.boxes import last_box
from megarl.data.prompts import Prompt, PromptSource
from megarl.recipe.names import VERIFIERS
from megarl.recipe.reward_table import RewardPart
from megarl.recipe.tables import Recipe, RewardTable
from megarl.rewards import GroupVerifier, Score, Verifier, VerifierModule
from megarl.rewards.python import Python, try_function


def check_reward(recipe: Recipe) -> None:
    """Raise `UserError` if the recipe's verifier cannot score its prompts, or a part's function cannot be loaded."""
    _module(recipe).check(recipe)
    for part in recipe.reward.parts:
        if part.path is not None:
            try_function(recipe, Python(part.path))


def build_verifier(recipe: Recipe, prompts: PromptSource) -> Verifier:
    """The verifier that ``[reward] kind`` names, for the training and held-out prompts of ``prompts``."""
    verifier = _module(recipe).build(recipe.reward, prompts)
    if not recipe.reward.parts:
        return verifier
    return WithParts(verifier, recipe.reward.parts)


def _module(recipe: Recipe) -> VerifierModule:
    return cast(VerifierModule, importlib.import_module(VERIFIERS[recipe.reward.kind]))


class WithParts:
    """A verifier with the parts that read the response's text: their weighted sum is added as ``Score.extra``."""

    def __init__(self, verifier: Verifier, parts: Sequence[RewardPart]) -> None:
        self._verifier = verifier
        self._boxes = sum(part.weight for part in parts if part.kind == "box")
        self._functions = [(part.weight, Python(str(part.path))) for part in parts if part.kind == "python"]

    def score(self, prompt: Prompt, response: str) -> Score:
        return self._with_parts(self._verifier.score(prompt, response), prompt, response)

    def score_group(self, prompt: Prompt, responses: Sequence[str]) -> list[Score]:
        """As `GroupVerifier.score_group`; the wrapped verifier must be a `GroupVerifier`."""
        found = cast(GroupVerifier, self._verifier).score_group(prompt, responses)
        return [self._with_parts(score, prompt, text) for score, text in zip(found, responses, strict=True)]

    def _with_parts(self, found: float | Score, prompt: Prompt, response: str) -> Score:
        score = found if isinstance(found, Score) else Score(found)
        boxed = last_box(response.rpartition("</think>")[2] or response)  # as `math` reads it
        extra = self._boxes if boxed is not None else 0.0
        extra += sum(weight * function.score(prompt, response).value for weight, function in self._functions)
        return replace(score, extra=extra)


def total(score: Score, tokens: int, table: RewardTable, longest: int) -> tuple[float, float]:
    """(reward, correct) of a response with this score: all parts of the reward but "length"; 1.0 if right, else 0.0.

    tokens: the response's length; longest: ``rollout.max_response_tokens``.
    """
    correct = float(score.value >= table.correct_above)
    base = score.value if table.partial_credit else correct
    if score.reward is not None:
        base = score.reward
    result = table.weight * base + score.extra
    for part in table.parts:
        if part.kind == "overlong":
            assert part.buffer is not None
            result += part.weight * overlong(tokens, longest, part.buffer)
    return result, correct


def totals(
    scores: Sequence[Score], tokens: Sequence[int], table: RewardTable, longest: int
) -> list[tuple[float, float]]:
    """(reward, correct) of each response to a prompt: `total` plus the reward of its length within the group."""
    found = [total(score, length, table, longest) for score, length in zip(scores, tokens, strict=True)]
    length_rewards = by_length(tokens, [correct == 1 for _, correct in found], table)
    return [(reward + extra, correct) for (reward, correct), extra in zip(found, length_rewards, strict=True)]


def by_length(tokens: Sequence[int], right: Sequence[bool], table: RewardTable) -> list[float]:
    """Kimi k1.5's length reward (arXiv:2501.12599, section 2.3.3) of each response to a prompt, times its weight.

    It falls linearly from 0.5 for the shortest response to -0.5 for the longest, but is at most 0 for wrong ones; it is
    0 if all have the same length.
    """
    weight = sum(part.weight for part in table.parts if part.kind == "length")
    least, most = min(tokens), max(tokens)
    if not weight or least == most:
        return [0.0] * len(tokens)
    shares = [0.5 - (length - least) / (most - least) for length in tokens]
    return [weight * (share if ok else min(0.0, share)) for share, ok in zip(shares, right, strict=True)]


def overlong(tokens: int, longest: int, buffer: int) -> float:
    """DAPO's soft length penalty (arXiv:2503.14476, Eq. 13): 0 up to ``longest - buffer`` tokens, then linear to -1."""
    return -min(1.0, max(0, tokens - (longest - buffer)) / buffer)
