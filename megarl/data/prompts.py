"""The prompts of a run: the order of training, and those held out for evaluation.

A `PromptSource` has random access: the index-th prompt of a run depends only on the recipe and the index. So a worker
that takes group 70000 builds only that prompt, and a resumed phase sees the same prompts as the killed one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.data.files import Item
from megarl.data.sources import FileItems, GymItems, Mixture, open_items, shares
from megarl.data.templates import Overlong, Renderer
from megarl.data.tokenizer import check_tokenizer_fits, files_of, is_of_tokenizer, load_tokenizer
from megarl.errors import Note, UserError, did_you_mean
from megarl.recipe.data_table import DataTable, SourceTable
from megarl.recipe.tables import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# of a row, texts of at most so many characters and so many columns are kept with the run, but no solutions and tests
ROW_TEXT, ROW_COLUMNS = 200, 100
COLUMN_VALUES = 32  # of a column in metrics.by, at most
REDRAWS = 64  # at most half of a generator's prompts are held out, so 64 draws all meet them with probability 2**-64


def check_data(recipe: Recipe, hf: dict[str, Any]) -> None:
    """Check everything about a recipe's prompts before a run; `UserError` for the first problem.

    Checked are the tokenizer, the prompts, and that the longest prompt with its response fits the model's context. hf:
    the model's configuration, from `read_hf_config`.
    """
    tokenizer = load_tokenizer(recipe.model.tokenizer_path)
    check_tokenizer_fits(tokenizer, recipe.model.path, hf["vocab_size"])
    build_prompts(recipe, tokenizer).check(recipe.prompts_needed, recipe.metrics.by)
    rollouts = recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
    lengths = [("data.max_prompt_tokens + rollout.max_response_tokens", rollouts)]
    for suite in recipe.suites:
        what = f"{suite.where}: max_prompt_tokens + max_response_tokens"
        lengths.append((what, suite.data.max_prompt_tokens + suite.max_response_tokens))
    for what, longest in lengths:
        if longest > (context := hf["max_position_embeddings"]):
            raise UserError(f"{what} = {longest}, but {recipe.model.path} has max_position_embeddings = {context}")


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model gets it, with what a verifier needs."""

    index: int  # position in the run's training order, or in the held-out list
    text: str
    tokens: tuple[int, ...]
    answer: str  # "" if the generator gives no single right answer, or the row has only tests
    entry: dict[str, Any]  # for the verifier: the item of the data set; for a generator's also its name

    @property
    def row(self) -> str:
        """What is kept of its row with the run: a JSON object of its ``source``, the name of a file or generator, and
        of the first columns that are numbers, truth values or texts of at most `ROW_TEXT` characters."""
        source = self.entry.get("generator") or self.entry.get("source", "")
        columns = {"source": source, **self.entry.get("metadata", {})}
        kept = ((name, value) for name, value in columns.items() if len(name) <= ROW_TEXT and _is_plain(value))
        return json.dumps(dict(itertools.islice(kept, ROW_COLUMNS)), ensure_ascii=False)


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= ROW_TEXT
    return (isinstance(value, int) and abs(value) < 2**63) or (isinstance(value, float) and math.isfinite(value))


# (index, item, words that name it in errors) -> the prompt, or None if it is too long and to be left out
Build = Callable[[int, Item, str], Prompt | None]


@dataclass(eq=False, repr=False)
class PromptSource:
    """The prompts of a run: ``train(index)`` in training order, ``heldout(suite)`` to evaluate; no prompt is in both.

    Prompts with the same tokens are the same prompt: for a tokenizer that folds case, "Ada=" and "ada=" are one.
    """

    items: Mixture
    suites: dict[str, list[Prompt]]  # suite -> its held-out prompts
    banned: frozenset[tuple[int, ...]]  # the tokens of prompts that are never trained
    scorers: dict[str, Any]  # generator name -> the reasoning-gym data set whose score_answer scores its responses
    build: Build
    seed: int

    def train(self, index: int) -> Prompt:
        """The index-th training prompt; indices begin at 0 and have no upper limit."""
        for attempt in range(REDRAWS):
            item = self.items.train(self.seed, index, attempt)
            prompt = self.build(index, item, f"training prompt {index}")
            if prompt is not None and prompt.tokens not in self.banned:
                return prompt
        raise UserError(
            f"there is no training prompt {index}: {REDRAWS} draws gave only held-out or overlong prompts; lower "
            "eval.prompts or raise data.max_prompt_tokens"
        )

    def check(self, count: int, columns: Sequence[str] = ()) -> None:
        """`UserError` for an unusable prompt of `first_epoch`, or if these are no ``columns`` for ``metrics.by``."""
        _check_columns(columns, list(self.first_epoch(count)))

    def first_epoch(self, count: int) -> Iterator[Prompt]:
        """Among the first ``count`` training prompts: each row of a file once, and one prompt of each generator."""
        left = [len(items.rows) if isinstance(items, FileItems) else 1 for items in self.items.sources]
        for index in range(count):
            source, _ = self.items.locate(self.seed, index)
            if left[source]:
                left[source] -= 1
                yield self.train(index)
            elif not any(left):
                return

    def heldout(self, suite: str | None = None) -> list[Prompt]:
        """The prompts of a suite; by default those of all suites, one suite after the other."""
        return [prompt for name, prompts in self.suites.items() if suite in (None, name) for prompt in prompts]


def _check_columns(names: Sequence[str], prompts: Sequence[Prompt]) -> None:
    """`UserError` for a column of ``metrics.by`` that no prompt has, or that has too many values."""
    rows = [json.loads(prompt.row) for prompt in prompts] if names else []
    known = list(dict.fromkeys(column for row in rows for column in row))
    for name in names:
        if name not in known:
            raise UserError(f"metrics.by: no prompt keeps a column {name!r}; {did_you_mean(name, known)}")
        if (values := len({row.get(name) for row in rows})) > COLUMN_VALUES:
            raise UserError(f"metrics.by: column {name!r} has {values} values; metrics are for at most {COLUMN_VALUES}")


def build_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PromptSource:
    """Open the recipe's data and choose the held-out prompts; `UserError` for a wrong file, generator or template."""
    renderer, build = _builder(recipe.data, tokenizer)
    sources, weights = recipe.data.mixture, [table.weight for table in recipe.data.mixture]
    items = [open_items(table) for table in sources]
    scorers = _scorers(items, sources)
    heldout: dict[str, list[Prompt]] = {}
    banned: list[Prompt] = []
    for suite in recipe.suites:
        if suite.own:
            (table,) = suite.data.mixture
            exam = open_items(table, exam=True)
            scorers |= _scorers([exam], [table])
            heldout[suite.name] = _draw(exam, _builder(suite.data, tokenizer)[1], suite.prompts)
            _warn_if_fewer(len(heldout[suite.name]), suite.prompts, table.train)
            for prompt in heldout[suite.name]:  # as training would render it: the suite may have its own template
                with contextlib.suppress(UserError):  # what does not fit the training template cannot be trained on
                    if trained := build(prompt.index, prompt.entry, "a row"):
                        banned.append(trained)
        else:
            distinct: dict[tuple[int, ...], Prompt] = {}
            for table, own, count in zip(sources, items, shares(weights, suite.prompts), strict=True):
                for prompt in _split(own, build, count, table.train) if count else ():
                    distinct.setdefault(prompt.tokens, prompt)
            heldout[suite.name] = [replace(prompt, index=n) for n, prompt in enumerate(distinct.values())]
            banned += heldout[suite.name]
    texts = {prompt.text for prompt in banned}
    for n, (table, own) in enumerate(zip(sources, items, strict=True)):
        if isinstance(own, FileItems):
            items[n] = FileItems(_training_rows(recipe.data, table.train, own.rows, renderer, build, texts))
    never_trained = frozenset(prompt.tokens for prompt in banned)
    return PromptSource(Mixture(items, weights), heldout, never_trained, scorers, build, recipe.run.seed)


def _builder(data: DataTable, tokenizer: PreTrainedTokenizerBase) -> tuple[Renderer, Build]:
    renderer = Renderer(data, tokenizer)

    def build(index: int, item: Item, where: str) -> Prompt | None:
        try:
            text, tokens = renderer.render(item, where)
        except Overlong:
            if data.overlong == "drop":
                return None
            raise
        return Prompt(index, text, tokens, item["answer"] or "", item)

    return renderer, build


def _scorers(items: Sequence[GymItems | FileItems], tables: Sequence[SourceTable]) -> dict[str, Any]:
    """Generator name -> its scorer; `UserError` if two sources are one generator with different options."""
    options: dict[str, Any] = {}
    for table in tables:
        if table.source == "reasoning_gym" and options.setdefault(table.train, table.options) != table.options:
            raise UserError(
                f"two of [[data.sources]] are the generator {table.train!r} with different options, but each generator "
                'can have only one scorer: use train = "composite", which mixes generators itself'
            )
    return {own.name: own.scorer for own in items if isinstance(own, GymItems)}


def _training_rows(
    data: DataTable, name: str, rows: list[Item], renderer: Renderer, build: Build, heldout: set[str]
) -> list[Item]:
    """The rows that are neither held out nor dropped for their length; `UserError` if none are left.

    heldout: the texts of held-out prompts. name: the file, for messages.
    """

    def text_of(item: Item) -> str | None:
        if data.overlong == "error":
            return renderer.text(item, "a row")  # skip the tokens, which take longer and are not needed
        prompt = build(0, item, "a row")
        return None if prompt is None else prompt.text

    if not heldout and data.overlong != "drop":
        return rows
    texts = [text_of(item) for item in rows]
    if too_long := texts.count(None):
        warnings.warn(
            f"{too_long} of the {len(rows)} prompts of {name} have more than data.max_prompt_tokens = "
            f"{data.max_prompt_tokens} tokens and are left out",
            category=Note,
            stacklevel=3,
        )
    kept = [item for item, text in zip(rows, texts, strict=True) if text is not None and text not in heldout]
    if not kept:
        raise UserError(f"every prompt of {name} is held out for evaluation or too long; nothing is left to train on")
    return kept


# the last result of `open_prompts`, after the state of recipe and files that it belongs to
_last_opened: tuple[object, PreTrainedTokenizerBase, PromptSource] | None = None


def open_prompts(recipe: Recipe, tokenizer_dir: Path) -> tuple[PreTrainedTokenizerBase, PromptSource]:
    """`load_tokenizer` and `build_prompts`, cached as long as recipe and files do not change.

    Forks of a process that has called this neither read the prompt files nor draw the held-out prompts again.
    """
    global _last_opened
    files = [Path(name) for name in recipe.prompt_files() + recipe.template_files() if Path(name).is_file()]
    # `RunDir.check_prompts` compares contents
    states = [(state.st_size, state.st_mtime_ns) for state in map(os.stat, files)]
    key = recipe.model_dump_json(), _tokenizer_content(tokenizer_dir), states
    if _last_opened is None or _last_opened[0] != key:
        tokenizer = load_tokenizer(tokenizer_dir)
        _last_opened = key, tokenizer, build_prompts(recipe, tokenizer)
    return _last_opened[1:]


def banned_prompts(recipe: Recipe, tokenizer_dir: Path) -> frozenset[tuple[int, ...]]:
    """The tokens of each prompt that the recipe holds out for evaluation, in the training template.

    Empty without evaluation. Rollouts from elsewhere are compared with them.
    """
    return open_prompts(recipe, tokenizer_dir)[1].banned if recipe.suites else frozenset()


def _tokenizer_content(path: Path) -> dict[str, bytes]:
    """The contents of a tokenizer's files, not their paths, since each policy of a run has a copy of them."""
    return {name: (path / name).read_bytes() for name in files_of(path) if is_of_tokenizer(name)}


def _split(items: GymItems | FileItems, build: Build, count: int, name: str) -> list[Prompt]:
    """Choose ``count`` distinct prompts to hold out, but at most half of those that the source has."""
    if isinstance(items, FileItems):
        heldout = _distinct(itertools.islice(items.candidates(), len(items.rows) // 2), build, count)
    else:
        # 2 n ln 2 = 1.39 n draws from 2 n prompts give n different ones on average. If these draws give fewer, the
        # generator has fewer than 2 n prompts, and only half of those drawn are held out.
        heldout = _draw(items, build, count)
        if len(heldout) < count:
            heldout = heldout[: len(heldout) // 2]
    if not heldout:
        raise UserError(f"{name} has too few different prompts to hold one out; set eval.suite, or eval.every = 0")
    _warn_if_fewer(len(heldout), count, name)
    return heldout


def _draw(items: GymItems | FileItems, build: Build, count: int) -> list[Prompt]:
    """Up to ``count`` distinct prompts among 1.4 ``count`` draws."""
    candidates = itertools.islice(items.candidates(), REDRAWS * count)  # bounded, in case nearly all are too long
    return _distinct(candidates, build, count, math.ceil(1.4 * count))


def _distinct(items: Iterable[Item], build: Build, count: int, draws: int | None = None) -> list[Prompt]:
    """Up to ``count`` different prompts among the first ``draws`` that are not too long."""
    found: dict[tuple[int, ...], Prompt] = {}
    built = (prompt for item in items if (prompt := build(len(found), item, f"held-out prompt {len(found)}")))
    for prompt in itertools.islice(built, draws):
        found.setdefault(prompt.tokens, prompt)
        if len(found) == count:
            break
    return list(found.values())


def _warn_if_fewer(found: int, asked: int, name: str) -> None:
    if found < asked:
        warnings.warn(
            f"evaluation uses only the {found} distinct prompts of {name}, but eval.prompts asks for {asked}",
            category=Note,
            stacklevel=3,
        )
