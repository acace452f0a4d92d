"""``megarl data``: prompts as the model sees them, and a check of every row for errors that would stop a run."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
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

SHOWN = 5  # rows that are named for each kind of mistake
VALUES = re.compile(r"\d+|(?<!column )['\"].*")  # of a message; what is before them says what kind of mistake it is


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
class File:
    """What was found in a prompt file."""

    path: str
    prompts: int
    repetitions: int  # prompts that equal an earlier one, apart from case and spaces
    tokens: dict[str, int] | None = None  # lengths with markup: median, 99 % quantile, longest
    longer: int = 0  # prompts with more than data.max_prompt_tokens
    same: int = 0  # prompts with the tokens of an earlier one whose row is another
    hidden: list[str] = field(default_factory=list)  # columns that no template shows to the model

    def lines(self) -> Iterator[str]:
        """Lines of text for a terminal."""
        yield f"{self.path}: {self.prompts} prompts, {self.repetitions} of them repetitions of others"
        if self.tokens:
            median, high, longest = self.tokens.values()
            yield f"  tokens: median {median}, 99 % up to {high}, longest {longest}"
        if self.same:
            yield f"  {self.same} prompts have the same tokens as an earlier one, but another row"
        if self.hidden:
            yield f"  columns that no prompt shows: {', '.join(self.hidden)}"


@dataclass
class Overlap:
    """Prompts of the training files that equal held-out ones."""

    heldout: int  # number of held-out prompts
    same: int  # number of those that are held-out prompts themselves, and so not trained on
    nearly: list[str]  # those that differ only in case or spaces

    def lines(self) -> Iterator[str]:
        """Lines of text for a terminal."""
        yield (
            f"{self.heldout} held-out prompts: of the training files, {self.same} prompts are among them and are not "
            f"trained on, {len(self.nearly)} differ from one only in case or spaces"
        )
        yield from (f"  differs only in case or spaces: {text[:100]!r}" for text in self.nearly[:SHOWN])


@dataclass
class Findings:
    """Findings of the check: files, notes, overlap with held-out prompts, and problems that would stop a run."""

    files: list[File] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    overlap: Overlap | None = None
    problems: list[str] = field(default_factory=list)
    example: str = ""  # a prompt with a response that is made up, and its score

    def text(self) -> str:
        """The whole report as text for a terminal."""
        lines = [line for file in self.files for line in file.lines()] + self.notes
        lines += self.overlap.lines() if self.overlap else ()
        lines += [self.example] if self.example else []
        return "\n".join([*lines, *([f"WRONG: {problem}" for problem in self.problems] or ["no problems found"])])

    def as_json(self) -> str:
        return json.dumps(asdict(self))


def check_prompts(recipe: Recipe) -> Findings:
    """Read all prompt files to their end. `UserError` only for an unfit tokenizer; other errors are in the report."""
    report, tokenizer = Findings(), load_tokenizer(recipe.model.tokenizer_path)
    train: list[str] = []
    for data in (recipe.data, *(suite.data for suite in recipe.suites if suite.own)):
        for table in data.mixture:
            if table.source == "file":
                items, file = _read(report, table, exam=data is not recipe.data)
                _measure(report, file, table, data, items, tokenizer)
                train += [_asked(item) for item in items if data is recipe.data]
    if not report.problems:
        _check_start(report, recipe, tokenizer, train)
        return report
    try:  # a start would end at the first of them, but the verifier can read the answers of the other rows
        check_reward(recipe)
    except (UserError, PhaseFailed) as error:
        report.problems += [line for line in str(error).splitlines() if line not in report.problems]
    return report


def _read(report: Findings, table: SourceTable, exam: bool) -> tuple[list[Item], File]:
    """The valid rows of a file, and a record of it; errors of the other rows, or of the file, go to the report."""
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
    different = {_normalized(_asked(item)) for item in good}
    report.files.append(File(str(table.train), len(good), len(good) - len(different)))
    return good, report.files[-1]


def _measure(
    report: Findings, file: File, table: SourceTable, data: DataTable, items: Sequence[Item], tokenizer: Any
) -> None:
    """Measure the lengths of a file's prompts with all their markup; those that are too long go to the report."""
    try:
        renderer = Renderer(data, tokenizer)
    except UserError as error:
        report.problems.append(str(error))
        return
    lengths: list[int] = []
    unfit: list[str] = []
    rows: dict[tuple[int, ...], str] = {}
    for number, item in enumerate(items, 1):
        try:
            _, tokens = renderer.whole(item, f"{table.train}, prompt {number}")
        except UserError as error:
            unfit.append(str(error))
            continue
        lengths.append(len(tokens))
        row = json.dumps(item, sort_keys=True, default=str)
        file.same += rows.setdefault(tokens, row) != row
    file.hidden = list(dict.fromkeys(name for item in items for name in item["metadata"] if name not in renderer.shown))
    _tell(report, unfit, "prompts that do not fit the template")
    if lengths:
        median, high = np.percentile(lengths, [50, 99])
        file.tokens = {"median": round(median), "high": round(high), "longest": max(lengths)}
    file.longer = sum(length > data.max_prompt_tokens for length in lengths)
    if file.longer:
        fate = {"error": "the run would stop", "drop": "they are left out"}[data.overlong]
        line = f"{file.longer} prompts of {table.train} have more than data.max_prompt_tokens = "
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
    report.example = _example(recipe, prompts)
    heldout = prompts.heldout()
    if heldout and train:
        asked = {_asked(prompt.entry) for prompt in heldout}
        plain = set(map(_normalized, asked))
        nearly = [text for text in train if text not in asked and _normalized(text) in plain]
        report.overlap = Overlap(len(heldout), sum(text in asked for text in train), nearly)


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
    """Add the first errors of each kind to the report, and the number of the others, which are called ``what``."""
    kinds: Counter[str] = Counter()
    for error in wrong:
        kind = VALUES.sub("", error)
        kinds[kind] += 1
        if kinds[kind] <= SHOWN:
            report.problems.append(error)
    if more := sum(max(0, count - SHOWN) for count in kinds.values()):
        report.problems.append(f"and {more} more {what}")


def _asked(item: Item) -> str:
    """The question of an item as one text; of chat messages, their contents line by line."""
    question = item["question"]
    return question if isinstance(question, str) else "\n".join(str(message["content"]) for message in question)


def _normalized(text: str) -> str:
    """A text in lower case with single spaces. Punctuation stays, since 2 + 2 is not 2 - 2."""
    return " ".join(text.lower().split())
