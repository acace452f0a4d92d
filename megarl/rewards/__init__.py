"""Verifiers turn the text of a response into a score, and the score becomes the reward.

Only the verifier `megarl.rewards.code` runs responses as code, in a sandbox.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Protocol

from megarl.data.files import read_rows
from megarl.data.prompts import Prompt, PromptSource
from megarl.errors import UserError
from megarl.recipe.tables import Recipe, RewardTable

MAX_ROWS_LISTED = 5  # the most bad rows of a prompt file that one message lists


@dataclass(frozen=True)
class Score:
    """How correct a response is, and what else its reward depends on (see `megarl.rewards.parts.total`)."""

    value: float  # correctness, from 0 (wrong) to 1 (right)
    over: str | None = None  # the verifier's own limit that the response exceeded, if it exceeded one
    reward: float | None = None  # replaces ``value`` when the reward is computed
    extra: float = 0.0  # added to the reward


class VerifierUnavailable(RuntimeError):
    """A service that a verifier needs does not answer. It ends the phase, which can be restarted; no score is given."""


class Verifier(Protocol):
    """Scores responses."""

    def score(self, prompt: Prompt, response: str) -> float | Score:
        """How correct ``response`` is, in [0, 1]; 0 for garbage. No text may make it raise, except MemoryError.

        It needs no limits of its own on time and memory: `megarl.rewards.pool` enforces them.
        """
        ...


class GroupVerifier(Verifier, Protocol):
    """The verifier of a recipe with ``reward.group``: it scores all responses to a prompt together."""

    def score_group(self, prompt: Prompt, responses: Sequence[str]) -> list[Score]:
        """The score of each response."""
        ...


class VerifierModule(Protocol):
    """The interface of a verifier's module, which `VERIFIERS` in `megarl.recipe.names` maps to ``[reward] kind``."""

    def check(self, recipe: Recipe) -> None:
        """Raise `UserError` if the verifier cannot score responses to the recipe's training or evaluation prompts."""

    def build(self, table: RewardTable, prompts: PromptSource) -> Verifier:
        """The verifier for all training and held-out prompts of ``prompts``."""
        ...


def is_scored(finish_reason: str, table: RewardTable) -> bool:
    """Whether a verifier reads a response at all.

    With ``table.require_stop`` a response that was cut off (``finish_reason`` other than "stop") is wrong unread.
    """
    return finish_reason == "stop" or not table.require_stop


def reward(score: float, table: RewardTable) -> float:
    """1.0 for a right response, whose score is at least ``table.correct_above``; else 0.0.

    `megarl.rewards.parts.total` computes the full reward, with partial credit and parts.
    """
    return 1.0 if score >= table.correct_above else 0.0


def read_score(found: Any, who: str) -> Score:
    """Check what a user's function or service returned: a number, or {"score": ..} with an optional "reward".

    who: names the function or service in the `UserError` for anything else.
    """
    if not isinstance(found, dict):
        return Score(_number(found, who))
    if unknown := found.keys() - {"score", "reward"}:
        raise UserError(f"{who} returned the key {sorted(unknown)[0]!r}: only score and reward are known")
    reward = found.get("reward")
    return Score(_number(found.get("score"), who), reward=None if reward is None else _number(reward, who))


def _number(value: Any, who: str) -> float:
    number = float(value) if isinstance(value, bool | int | float) else float("nan")
    if not isfinite(number):
        raise UserError(f"{who} returned {value!r:.60}: a score must be a finite number")
    return number


def row_of(prompt: Prompt) -> dict[str, Any]:
    """The columns of the prompt's row in its file or generator, by name."""
    return {"prompt": prompt.text, "answer": prompt.answer, **prompt.entry.get("metadata", {})}


def check_rows(recipe: Recipe, read: Callable[[Prompt], object]) -> None:
    """Call ``read`` with every row of the recipe's prompt files; report all its `UserError`s of a file as one."""
    for table in recipe.prompt_sources():
        wrong: list[str] = []
        for where, item in read_rows(table) if table.source == "file" else ():
            try:
                read(Prompt(0, str(item["question"]), (), item["answer"], item))
            except UserError as error:
                wrong.append(f"{where}: {error}")
        if wrong:
            more = f"\nand {len(wrong) - MAX_ROWS_LISTED} more rows" if len(wrong) > MAX_ROWS_LISTED else ""
            raise UserError("\n".join(wrong[:MAX_ROWS_LISTED]) + more)


def right_answer(prompt: Prompt) -> str:
    """The reference answer; `UserError` if the prompt has none, as with generators that only their scorer can judge."""
    if not prompt.answer:
        raise UserError(
            f'prompt {prompt.text[:60]!r} has no answer to compare with; use reward.kind = "reasoning_gym" for prompts '
            'of a generator, and "code" or "python" for those of a file'
        )
    return prompt.answer
