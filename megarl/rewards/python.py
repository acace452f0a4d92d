"""The verifier that calls a function in the user's own Python file: ``score(prompt, response, row) -> float | dict``.

It runs in the processes of `megarl.rewards.pool`, within their limits, and gets only texts and the prompt's row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

from megarl.data.files import read_rows
from megarl.data.prompts import Prompt, PromptSource
from megarl.data.sources import open_items
from megarl.data.templates import Renderer
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import UserError
from megarl.foreign import shown
from megarl.own_file import describe, file_of, load
from megarl.recipe.tables import Recipe, RewardTable
from megarl.rewards import Score, Verifier, read_score, row_of
from megarl.rewards.pool import Limits, VerifierPool

PATIENCE = 10.0  # seconds that a function may wait in the trial
OVER = {
    "time": "exceeds its limit (CPU time)",
    "memory": "exceeds its limit (memory)",
    "stuck": f"waits for more than {PATIENCE:g} s without using the CPU",
    "died": "ends its process",
}


def check(recipe: Recipe) -> None:
    """Raise `UserError` unless the file loads and its function scores made-up responses to a prompt of each source."""
    table = recipe.reward
    try_function(recipe, Python(str(table.path), table.scores), table.group)


def build(table: RewardTable, prompts: PromptSource) -> Verifier:
    """See `VerifierModule`."""
    return Python(str(table.path), table.scores)


def try_function(recipe: Recipe, verifier: Python, group: bool = False) -> None:
    """Score three responses to the first prompt of each source: its answer, a wrong one, an empty one.

    `UserError` if that does not work. It runs in processes of its own, within the limits of a run. group: as
    `RewardTable.group`.
    """
    tokenizer = load_tokenizer(recipe.model.tokenizer_path)
    parts = [recipe.data, *(suite.data for suite in recipe.suites if suite.own)]
    pool = VerifierPool(lambda: verifier, Limits(workers=1, patience=PATIENCE))
    try:
        for data, table in [(part, table) for part in parts for table in part.mixture]:
            renderer, exam = Renderer(data, tokenizer), data is not recipe.data
            item = read_rows(table, exam)[0][1] if table.source == "file" else open_items(table).train(0, 0, 0)
            answer = str(item["answer"] or "")
            text = renderer.text(item, f"the first prompt of {table.train}")
            prompt = Prompt(0, text, (), answer, item)
            texts = (answer or "a response", "a response", "")
            together = tuple(islice(cycle(texts), recipe.rollout.responses_per_prompt))
            questions: Sequence[str | tuple[str, ...]] = [together] if group else texts
            for question in questions:
                pool.ask(prompt, question)
            while verdicts := pool.verdicts(wait=True):
                for over in filter(None, (verdict.over for _, verdict in verdicts)):
                    raise UserError(f"{verifier.path} {OVER[over]} on the first prompt of {table.train}")
    finally:
        pool.close()


class Python:
    """Scores with the function at ``path``, FILE.py:FUNCTION. scores: as for `read_score`."""

    def __init__(self, path: str, scores: tuple[float, float] | None = None) -> None:
        self.path, self._scores, self._function = path, scores, load(path, "reward.path")

    def score(self, prompt: Prompt, response: str) -> Score:
        """The function returns the score, or {"score": ...} with an optional "reward" to train on instead."""
        who = f"{self.path}, on prompt {prompt.text[:60]!r} with response {response[:60]!r},"
        return read_score(self._call(prompt, response), who, self._scores)

    def score_group(self, prompt: Prompt, responses: Sequence[str]) -> list[Score]:
        """The function gets a list of responses instead of one, and returns a list of as many scores."""
        found = self._call(prompt, list(responses))
        if not isinstance(found, list | tuple) or len(found) != len(responses):
            expected = f"{len(responses)} responses: expected a list of as many scores"
            raise UserError(f"{self.path} returned {shown(found)} for {expected}")
        return [read_score(each, self.path, self._scores) for each in found]

    def _call(self, prompt: Prompt, responses: str | list[str]) -> Any:
        try:
            return self._function(prompt.text, responses, row_of(prompt))
        except MemoryError:
            raise  # a limit of the pool
        except (Exception, SystemExit) as error:
            given = f"response {responses[:60]!r}" if isinstance(responses, str) else f"{len(responses)} responses"
            raise UserError(
                f"{self.path} failed on prompt {prompt.text[:60]!r} with {given}: {describe(error, file_of(self.path))}"
            ) from error
