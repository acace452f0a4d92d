"""Verifiers: a response's text becomes a score, and the score becomes the reward.

Of all verifiers only `megarl.rewards.code` runs a response as code, in a sandbox.
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

BAD_ROWS_TOLD = 5  # of a prompt file, in one message


@dataclass(frozen=True)
class Score:
    """How right a response is, in [0, 1], and what else decides its reward (`megarl.rewards.parts.total`)."""

    value: float
    over: str | None = None  # a limit of the verifier's own that it exceeded
    reward: float | None = None  # what takes the place of ``value`` in the reward
    extra: float = 0.0  # what is added


class VerifierUnavailable(RuntimeError):
    """What a verifier asks says nothing now. It ends the phase, which can be started again; it is no score."""


class Verifier(Protocol):
    def score(self, prompt: Prompt, response: str) -> float | Score:
        """How right ``response`` is, in [0, 1]; 0 for garbage, and no exception because of its text but MemoryError.

        It may take as long, and as much memory, as the response makes it: `megarl.rewards.pool` has the limits.
        """
        ...


class GroupVerifier(Verifier, Protocol):
    """Of a recipe with ``reward.group``: no response is scored without the others to its prompt."""

    def score_group(self, prompt: Prompt, responses: Sequence[str]) -> list[Score]:
        """How right each of them is."""
        ...


class VerifierModule(Protocol):
    """What the module of a verifier offers; the rest of megarl knows it by its line in `megarl.recipe.names`."""

    def check(self, recipe: Recipe) -> None:
        """`UserError` if the verifier cannot judge responses to the recipe's training or evaluation prompts."""

    def build(self, table: RewardTable, prompts: PromptSource) -> Verifier:
        """The verifier for all training and held-out prompts of ``prompts``."""
        ...


def is_scored(finish_reason: str, table: RewardTable) -> bool:
    """Whether a verifier reads a response at all.

    With ``table.require_stop`` one that did not end by itself (``finish_reason`` other than "stop") is wrong, whatever
    it says.
    """
    return finish_reason == "stop" or not table.require_stop


def reward(score: float, table: RewardTable) -> float:
    """1.0 for a right response, one with a score of ``table.correct_above`` or more, else 0.0.

    `megarl.rewards.parts.total` is what such a response gets where the recipe has partial credit or parts.
    """
    return 1.0 if score >= table.correct_above else 0.0


def read_score(found: Any, who: str) -> Score:
    """What a user's function or service says: a number, or {"score": ..} with, if it likes, "reward".

    ``who`` says it, for the `UserError` when it is neither.
    """
    if not isinstance(found, dict):
        return Score(_number(found, who))
    if unknown := found.keys() - {"score", "reward"}:
        raise UserError(f"{who} gave {sorted(unknown)[0]!r}: a score has the keys score and reward")
    reward = found.get("reward")
    return Score(_number(found.get("score"), who), reward=None if reward is None else _number(reward, who))


def _number(value: Any, who: str) -> float:
    number = float(value) if isinstance(value, bool | int | float) else float("nan")
    if not isfinite(number):
        raise UserError(f"{who} gave {value!r:.60}: a score is a finite number")
    return number


def row_of(prompt: Prompt) -> dict[str, Any]:
    """The columns of the prompt's row."""
    return {"prompt": prompt.text, "answer": prompt.answer, **prompt.entry.get("metadata", {})}


def check_rows(recipe: Recipe, read: Callable[[Prompt], object]) -> None:
    """``read`` every row of the recipe's prompt files; one `UserError` for all whose reading raises one."""
    for table in recipe.prompt_sources():
        wrong: list[str] = []
        for where, item in read_rows(table) if table.source == "file" else ():
            try:
                read(Prompt(0, str(item["question"]), (), item["answer"], item))
            except UserError as error:
                wrong.append(f"{where}: {error}")
        if wrong:
            more = f"\nand {len(wrong) - BAD_ROWS_TOLD} more rows" if len(wrong) > BAD_ROWS_TOLD else ""
            raise UserError("\n".join(wrong[:BAD_ROWS_TOLD]) + more)


def right_answer(prompt: Prompt) -> str:
    """The answer to compare with; `UserError` where a generator names none, because only its own scorer can judge."""
    if not prompt.answer:
        raise UserError(
            f'prompt {prompt.text[:60]!r} names no answer; use reward.kind = "reasoning_gym" for a generator\'s, and '
            '"code" or "python" for a file of other rows'
        )
    return prompt.answer
