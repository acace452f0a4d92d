"""`megarl data check`: every row of a recipe's files, and whether a run on them would meet one that it cannot use."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.data.files import Item, scan_rows
from megarl.data.overlap import WORDS, overlapping, repeated
from megarl.data.prompts import build_prompts
from megarl.data.templates import Renderer
from megarl.data.tokenizer import load_tokenizer
from megarl.errors import UserError
from megarl.recipe.data_table import DataTable, SourceTable
from megarl.recipe.tables import Recipe
from megarl.rewards.parts import check_reward

TOLD = 5  # rows that are named of each kind of mistake


@dataclass
class Report:
    """Lines for a person, and what would go wrong."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def text(self) -> str:
        ends = [f"WRONG: {problem}" for problem in self.problems] or ["nothing would go wrong"]
        return "\n".join([*self.lines, *ends])


def check_prompts(recipe: Recipe) -> Report:
    """Read all files of prompts from the first row to the last. `UserError` for an unfit tokenizer alone."""
    report, tokenizer = Report(), load_tokenizer(recipe.model.tokenizer_path)
    train: list[str] = []
    for data in (recipe.data, *(suite.data for suite in recipe.suites if suite.own)):
        for table in data.mixture:
            if table.source == "file":
                items = _read(report, table)
                _measure(report, table, data, items, _renderer(report, data, tokenizer))
                train += [_asked(item) for item in items if data is recipe.data]
    if not report.problems:
        _rehearse(report, recipe, tokenizer, train)
    return report


def _read(report: Report, table: SourceTable) -> list[Item]:
    """The rows that are prompts; what is wrong with the others, and with the file, goes to the report."""
    good: list[Item] = []
    wrong: list[str] = []
    try:
        for _, item in scan_rows(table):
            wrong.append(str(item)) if isinstance(item, UserError) else good.append(item)
    except UserError as error:
        wrong.append(str(error))
    if not good and not wrong:
        wrong.append(f"{table.train} holds no prompts")
    _tell(report, wrong, "rows that cannot be used")
    copies = repeated(_asked(item) for item in good)
    report.lines.append(f"{table.train}: {len(good)} prompts, {copies} of them repetitions of others")
    return good


def _renderer(report: Report, data: DataTable, tokenizer: Any) -> Renderer | None:
    try:
        return Renderer(data, tokenizer)
    except UserError as error:
        report.problems.append(str(error))
        return None


def _measure(
    report: Report, table: SourceTable, data: DataTable, items: Sequence[Item], renderer: Renderer | None
) -> None:
    """Lengths of a file's prompts with all their markup."""
    if renderer is None or not items:
        return
    lengths: list[int] = []
    unfit: list[str] = []
    for number, item in enumerate(items, 1):
        try:
            lengths.append(renderer.length(item, f"{table.train}, prompt {number}"))
        except UserError as error:
            unfit.append(str(error))
    _tell(report, unfit, "prompts that do not fit the template")
    if lengths:
        middle, high = np.percentile(lengths, [50, 99])
        report.lines.append(f"  tokens: median {middle:.0f}, 99 % up to {high:.0f}, longest {max(lengths)}")
    if longer := sum(length > data.max_prompt_tokens for length in lengths):
        fate = {"error": "the run stops at them", "drop": "left out", "truncate": "cut"}[data.overlong]
        line = f"{longer} prompts of {table.train} have more than data.max_prompt_tokens = {data.max_prompt_tokens}"
        (report.problems if data.overlong == "error" else report.lines).append(f"{line}: {fate}")


def _rehearse(report: Report, recipe: Recipe, tokenizer: Any, train: list[str]) -> None:
    """What a start of the run does with all of it, and how held-out prompts and training ones overlap."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            prompts = build_prompts(recipe, tokenizer)
            prompts.check(recipe.prompts_needed)
            check_reward(recipe)
        except UserError as error:
            report.problems.append(str(error))
            return
    report.lines += sorted({str(warning.message) for warning in said if warning.category is UserWarning})
    heldout = prompts.heldout()
    if heldout and train:
        asked = [_asked(prompt.entry) for prompt in heldout]
        exact, shared = overlapping(train, asked)
        same = set(asked)
        nearly = [n for n in exact if train[n] not in same]
        report.lines.append(
            f"{len(heldout)} held-out prompts: of the training files {len(exact) - len(nearly)} prompts are among them "
            f"and are not trained, {len(nearly)} differ in case or spaces alone, {len(shared)} share {WORDS} words in "
            "a row with one"
        )
        report.lines += [f"  differs in case or spaces alone: {train[n][:100]!r}" for n in nearly[:TOLD]]
        report.lines += [f"  shares {WORDS} words: {train[n][:100]!r}" for n in shared[:TOLD]]


def _tell(report: Report, wrong: list[str], what: str) -> None:
    report.problems += wrong[:TOLD]
    if len(wrong) > TOLD:
        report.problems.append(f"and {len(wrong) - TOLD} more {what}")


def _asked(item: Item) -> str:
    """The question of an item as one text."""
    question = item["question"]
    return question if isinstance(question, str) else "\n".join(str(message["content"]) for message in question)
