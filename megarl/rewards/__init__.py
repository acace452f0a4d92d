"""Verifiers turn the text of a response into a score, and the score becomes the reward.

Only the verifier `megarl.rewards.code` runs responses as code, in a sandbox.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megarl.data.files import scan_rows
from megarl.data.prompts import Prompt, PromptSource
from megarl.errors import UserError
from megarl.foreign import bounded, shown
from megarl.recipe.tables import Recipe, RewardTable

TAGGED = re.compile(r"<(?:answer|Answer|ANSWER)>(.*?)</(?:answer|Answer|ANSWER)>", re.DOTALL)
MAX_ROWS_LISTED = 5  # the most bad rows of a prompt file that one message lists


@dataclass(frozen=True)
class Score:
    """How correct a response is, and what else its reward depends on (see `megarl.rewards.parts.total`)."""

    value: float  # correctness, from 0 (wrong) to 1 (right)
    over: str | None = None  # the verifier's own limit that the response exceeded, if it exceeded one
    reward: float | None = None  # replaces ``value`` when the reward is computed
    extra: float = 0.0  # added to the reward


class NoAnswer(UserError):
    """A prompt has no reference answer, or one that cannot be read. In a suite every response to it is then wrong."""


class NoNumber(UserError, ValueError):
    """What was returned as a score or reward is no finite number."""


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


def read_score(found: Any, who: str, scores: tuple[float, float] | None = None) -> Score:
    """Check what a user's function or service returned: a number, or {"score": ..} with an optional "reward".

    scores: ``reward.scores``, the least and the largest score; None: of a part, which has no such limits.
    who: names the function or service in the `UserError` for anything else.
    """
    if not isinstance(found, dict):
        found = {"score": found}
    if unknown := found.keys() - {"score", "reward"}:
        raise UserError(f"{who} returned the key {sorted(unknown)[0]!r}: only score and reward are known")
    if "score" not in found:
        raise UserError(f'{who} returned a dictionary without "score"')
    reward = found.get("reward")
    score = _number(found.get("score"), who)
    if scores and not scores[0] <= score <= scores[1]:
        low, high = min(score, 0.0), max(score, 1.0)
        raise UserError(
            f"{who} returned the score {score:g}, but scores are from {scores[0]:g} to {scores[1]:g}: return what is "
            f'to be trained on as "reward" beside it, or declare others, as in reward.scores = [{low:g}, {high:g}]'
        )
    return Score(score, reward=None if reward is None else _number(reward, who))


def _number(value: Any, who: str) -> float:
    if value is None:
        raise NoNumber(f"{who} returned a score or reward that is None; is a return missing?")
    try:
        value = value.item() if hasattr(value, "item") else value  # numpy's and torch's numbers
    except (ValueError, RuntimeError) as error:
        raise NoNumber(f"{who} returned a score or reward of several numbers: {shown(value)}") from error
    try:
        return bounded(value)
    except ValueError as error:
        raise NoNumber(f"{who} returned a score or reward that {error}") from error


def row_of(prompt: Prompt) -> dict[str, Any]:
    """The columns of the prompt's row in its file or generator, by name."""
    return {"prompt": prompt.text, "answer": prompt.answer, **prompt.entry.get("metadata", {})}


def check_rows(recipe: Recipe, read: Callable[[Prompt], object]) -> None:
    """Call ``read`` with every row of the recipe's prompt files; report all its `UserError`s of a file as one.

    `NoAnswer` in the file of a suite is only warned of.
    """
    for table in recipe.prompt_sources():
        found = list(scan_rows(table, exam=table not in recipe.data.mixture)) if table.source == "file" else []
        rows = [(where, item) for where, item in found if not isinstance(item, UserError)]
        wrong: list[str] = []
        unread: list[str] = []
        for where, item in rows:
            try:
                read(Prompt(0, str(item["question"]), (), item["answer"], item))
            except UserError as error:
                (unread if isinstance(error, NoAnswer) and "exam" in item else wrong).append(f"{where}: {error}")
        if unread:
            warnings.warn(
                f"{table.train}: {len(unread)} of its {len(rows)} answers cannot be read, so all responses to these "
                f"prompts will count as wrong; the first is {unread[0]}",
                stacklevel=3,
            )
        wrong = wrong or [str(item) for _, item in found if isinstance(item, UserError)][:1]
        if wrong:
            more = f"\nand {len(wrong) - MAX_ROWS_LISTED} more rows" if len(wrong) > MAX_ROWS_LISTED else ""
            raise UserError("\n".join(wrong[:MAX_ROWS_LISTED]) + more)


class Comparing:
    """The verifier that scores 1 if ``accepts(response, right answer)`` for any right answer to the prompt, else 0."""

    def __init__(self, accepts: Callable[[str, str], bool]) -> None:
        self._accepts = accepts

    def score(self, prompt: Prompt, response: str) -> float:
        for right in right_answers(prompt):
            try:
                if self._accepts(response, right):
                    return 1.0
            except MemoryError:
                raise
            except Exception:  # SymPy raises many kinds on text that it cannot parse or compare: the response is wrong
                continue
        return 0.0


def comparing(
    accepts: Callable[[str, str], bool],
) -> tuple[Callable[[Recipe], None], Callable[[RewardTable, PromptSource], Verifier]]:
    """The functions `check` and `build` of a `VerifierModule` whose verifier is `Comparing`."""
    return lambda recipe: check_rows(recipe, right_answers), lambda table, prompts: Comparing(accepts)


def right_answers(prompt: Prompt) -> tuple[str, ...]:
    """The reference answer, and the others of data that has several (``skywork_or1``): any of them is right.

    `NoAnswer` if the prompt has none, as with generators that only their scorer can judge.
    """
    if not prompt.answer:
        raise NoAnswer(
            f'prompt {prompt.text[:60]!r} has no answer to compare with; use reward.kind = "reasoning_gym" for prompts '
            'of a generator, and "code" or "python" for those of a file'
        )
    return prompt.answer, *prompt.entry.get("metadata", {}).get("also_right", ())
