"""`megarl data check`: every row of a recipe's files, and whether a run on them would meet one that it cannot use."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
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
class File:
    """A file of prompts."""

    path: str
    prompts: int
    repetitions: int  # prompts that stood there before
    tokens: dict[str, int] | None = None  # of prompts with their markup: median, 99 % quantile, longest
    longer: int = 0  # prompts with more than data.max_prompt_tokens

    def lines(self) -> Iterator[str]:
        """For a person."""
        yield f"{self.path}: {self.prompts} prompts, {self.repetitions} of them repetitions of others"
        if self.tokens:
            median, high, longest = self.tokens.values()
            yield f"  tokens: median {median}, 99 % up to {high}, longest {longest}"


@dataclass
class Overlap:
    """Prompts of the training files that are like held-out ones."""

    heldout: int  # prompts
    same: int  # that are among them, and are not trained
    nearly: list[str]  # that differ in case or spaces alone
    shared: list[str]  # that share `WORDS` words in a row with one

    def lines(self) -> Iterator[str]:
        """For a person."""
        yield (
            f"{self.heldout} held-out prompts: of the training files {self.same} prompts are among them and are not "
            f"trained, {len(self.nearly)} differ in case or spaces alone, {len(self.shared)} share {WORDS} words in a "
            "row with one"
        )
        yield from (f"  differs in case or spaces alone: {text[:100]!r}" for text in self.nearly[:TOLD])
        yield from (f"  shares {WORDS} words: {text[:100]!r}" for text in self.shared[:TOLD])


@dataclass
class Report:
    """What there is, what a person should know of it, and what would go wrong."""

    files: list[File] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    overlap: Overlap | None = None
    problems: list[str] = field(default_factory=list)

    def text(self) -> str:
        """For a terminal."""
        lines = [line for file in self.files for line in file.lines()] + self.notes
        lines += self.overlap.lines() if self.overlap else ()
        return "\n".join([*lines, *([f"WRONG: {problem}" for problem in self.problems] or ["nothing would go wrong"])])

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def check_prompts(recipe: Recipe) -> Report:
    """Read all files of prompts from the first row to the last. `UserError` for an unfit tokenizer alone."""
    report, tokenizer = Report(), load_tokenizer(recipe.model.tokenizer_path)
    train: list[str] = []
    for data in (recipe.data, *(suite.data for suite in recipe.suites if suite.own)):
        for table in data.mixture:
            if table.source == "file":
                items, file = _read(report, table)
                _measure(report, file, table, data, items, _renderer(report, data, tokenizer))
                train += [_asked(item) for item in items if data is recipe.data]
    if not report.problems:
        _rehearse(report, recipe, tokenizer, train)
    return report


def _read(report: Report, table: SourceTable) -> tuple[list[Item], File]:
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
    report.files.append(File(str(table.train), len(good), repeated(_asked(item) for item in good)))
    return good, report.files[-1]


def _renderer(report: Report, data: DataTable, tokenizer: Any) -> Renderer | None:
    try:
        return Renderer(data, tokenizer)
    except UserError as error:
        report.problems.append(str(error))
        return None


def _measure(
    report: Report, file: File, table: SourceTable, data: DataTable, items: Sequence[Item], renderer: Renderer | None
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
        median, high = np.percentile(lengths, [50, 99])
        file.tokens = {"median": round(median), "high": round(high), "longest": max(lengths)}
    file.longer = sum(length > data.max_prompt_tokens for length in lengths)
    if file.longer:
        fate = {"error": "the run stops at them", "drop": "left out", "truncate": "cut"}[data.overlong]
        line = f"{file.longer} prompts of {table.train} have more than data.max_prompt_tokens = "
        line += f"{data.max_prompt_tokens}: {fate}"
        (report.problems if data.overlong == "error" else report.notes).append(line)


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
    report.notes += sorted({str(warning.message) for warning in said if warning.category is UserWarning})
    heldout = prompts.heldout()
    if heldout and train:
        asked = [_asked(prompt.entry) for prompt in heldout]
        exact, shared = overlapping(train, asked)
        same = set(asked)
        nearly = [train[n] for n in exact if train[n] not in same]
        report.overlap = Overlap(len(heldout), len(exact) - len(nearly), nearly, [train[n] for n in shared])


def _tell(report: Report, wrong: list[str], what: str) -> None:
    report.problems += wrong[:TOLD]
    if len(wrong) > TOLD:
        report.problems.append(f"and {len(wrong) - TOLD} more {what}")


def _asked(item: Item) -> str:
    """The question of an item as one text."""
    question = item["question"]
    return question if isinstance(question, str) else "\n".join(str(message["content"]) for message in question)
