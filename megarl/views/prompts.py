"""``megarl data``: prompts as the model sees them, and a check of every row for errors that would stop a run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.data.files import Item, scan_rows
from megarl.data.prompts import Prompt, PromptSource, build_prompts, open_prompts
from megarl.data.templates import Renderer
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import Note, PhaseFailed, UserError
from megarl.recipe.data_table import DataTable, SourceTable
from megarl.recipe.tables import Recipe
from megarl.rewards import Score
from megarl.rewards.parts import build_verifier, check_reward

SHOWN = 20  # mistakes of a file that are named


def show_prompts(recipe: Recipe, count: int) -> str:
    """The first ``count`` training prompts and as many held-out ones, each with its text and all tokens."""
    tokenizer, prompts = open_prompts(recipe, recipe.model.tokenizer_path)
    shown = [(f"training prompt {n}", prompts.train(n)) for n in range(count)]
    shown += [(f"held-out prompt {prompt.index}", prompt) for prompt in prompts.heldout()[:count]]
    return "\n\n".join(_describe(name, prompt, tokenizer) for name, prompt in shown)


def _describe(name: str, prompt: Prompt, tokenizer: Any) -> str:
    tokens = " ".join(f"{token} {tokenizer.decode([token])!r}" for token in prompt.tokens)
    return f"--- {name}: {len(prompt.tokens)} tokens, answer {prompt.answer!r}\n{prompt.text}\n--- its tokens\n{tokens}"


@dataclass
class Findings:
    """Findings of the check, as lines of text, and problems that would stop a run."""

    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The whole report as text for a terminal."""
        wrong = [f"WRONG: {problem}" for problem in self.problems] or ["no problems found"]
        return "\n".join([*self.notes, *wrong])


def check_prompts(recipe: Recipe) -> Findings:
    """Read all prompt files to their end. `UserError` only for an unfit tokenizer; other errors are in the report."""
    report, tokenizer = Findings(), load_tokenizer(recipe.model.tokenizer_path)
    train: list[str] = []
    for data in (recipe.data, *(suite.data for suite in recipe.suites if suite.own)):
        for table in data.mixture:
            if table.source == "file":
                items = _read(report, table, exam=data is not recipe.data)
                _measure(report, table, data, items, tokenizer)
                train += [_asked(item) for item in items if data is recipe.data]
    if not report.problems:
        _check_start(report, recipe, tokenizer, train)
        return report
    try:  # a start would end at the first of them, but the verifier can read the answers of the other rows
        check_reward(recipe)
    except (UserError, PhaseFailed) as error:
        report.problems += [line for line in str(error).splitlines() if line not in report.problems]
    return report


def _read(report: Findings, table: SourceTable, exam: bool) -> list[Item]:
    """The valid rows of a file; errors of the other rows, or of the file, go to the report."""
    good: list[Item] = []
    wrong: list[str] = []
    try:
        for _, item in scan_rows(table, exam):
            wrong.append(str(item)) if isinstance(item, UserError) else good.append(item)
    except UserError as error:
        wrong.append(str(error))
    if not good and not wrong:
        wrong.append(f"{table.train} holds no prompts")
    _tell(report, wrong, "rows that cannot be used")
    repeated = len(good) - len({_normalized(_asked(item)) for item in good})
    report.notes.append(f"{table.train}: {len(good)} prompts, {repeated} of them repetitions of others")
    return good


def _measure(report: Findings, table: SourceTable, data: DataTable, items: Sequence[Item], tokenizer: Any) -> None:
    """Measure the lengths of a file's prompts with all their markup; those that are too long go to the report."""
    try:
        renderer = Renderer(data, tokenizer)
    except UserError as error:
        report.problems.append(str(error))
        return
    lengths: list[int] = []
    unfit: list[str] = []
    for number, item in enumerate(items, 1):
        try:
            lengths.append(len(renderer.whole(item, f"{table.train}, prompt {number}")[1]))
        except UserError as error:
            unfit.append(str(error))
    _tell(report, unfit, "prompts that do not fit the template")
    if lengths:
        median, high = np.percentile(lengths, [50, 99])
        report.notes.append(f"  tokens: median {median:.0f}, 99 % up to {high:.0f}, longest {max(lengths)}")
    if hidden := dict.fromkeys(name for item in items for name in item["metadata"] if name not in renderer.shown):
        report.notes.append(f"  columns that no prompt shows: {', '.join(hidden)}")
    if longer := sum(length > data.max_prompt_tokens for length in lengths):
        fate = {"error": "the run would stop", "drop": "they are left out"}[data.overlong]
        line = f"{longer} prompts of {table.train} have more than data.max_prompt_tokens = "
        line += f"{data.max_prompt_tokens}: {fate}"
        (report.problems if data.overlong == "error" else report.notes).append(line)


def _check_start(report: Findings, recipe: Recipe, tokenizer: Any, train: list[str]) -> None:
    """Do what a start of the run does with the prompts, and look for overlap of training and held-out prompts."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            prompts = build_prompts(recipe, tokenizer)
            prompts.check(recipe.prompts_needed)
            check_reward(recipe)
        except (UserError, PhaseFailed) as error:
            report.problems.append(str(error))
            return
    report.notes += sorted({str(warning.message) for warning in said if warning.category is Note})
    heldout = prompts.heldout()
    if heldout and train:
        asked = {_asked(prompt.entry) for prompt in heldout}
        plain = set(map(_normalized, asked))
        nearly = [text for text in train if text not in asked and _normalized(text) in plain]
        report.notes.append(
            f"{len(heldout)} held-out prompts: of the training files, {sum(text in asked for text in train)} prompts "
            f"are among them and are not trained on, {len(nearly)} differ from one only in case or spaces"
        )
        report.notes += (f"  differs only in case or spaces: {text[:100]!r}" for text in nearly[:SHOWN])
    report.notes.append(_example(recipe, prompts))


def _example(recipe: Recipe, prompts: PromptSource) -> str:
    """A training prompt with a response that is made up, its answer, and the score of that; a service is not asked."""
    prompt = prompts.train(0)
    if recipe.reward.kind in ("judge", "http", "python"):
        return f"--- a prompt\n{prompt.text}\n--- its answer\n{prompt.answer}"
    form = {"exact": "{}", "reasoning_gym": "{}", "dapo": "Answer: {}", "code": "```python\n{}\n```"}.get(
        recipe.reward.kind, "\\boxed{{{}}}"
    )
    response = form.format(prompt.answer)
    score = build_verifier(recipe, prompts).score(prompt, response)
    value = score.value if isinstance(score, Score) else score
    return f"--- a prompt\n{prompt.text}\n--- a response that is made up: score {value:g}\n{response}"


def _tell(report: Findings, wrong: list[str], what: str) -> None:
    """Add the first errors to the report, and the number of the others, which are called ``what``."""
    report.problems += wrong[:SHOWN]
    if len(wrong) > SHOWN:
        report.problems.append(f"and {len(wrong) - SHOWN} more {what}")


def _asked(item: Item) -> str:
    """The question of an item as one text; of chat messages, their contents line by line."""
    question = item["question"]
    return question if isinstance(question, str) else "\n".join(str(message["content"]) for message in question)


def _normalized(text: str) -> str:
    """A text in lower case with single spaces. Punctuation stays, since 2 + 2 is not 2 - 2."""
    return " ".join(text.lower().split())
