"""The prompts of a run: in which order it sees them, and which it holds out for evaluation.

A `PromptSource` has random access: the index-th prompt of a run depends on the recipe and the index alone. So a worker
that takes group 70000 builds that prompt and no other, and a resumed phase sees what the killed one saw.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.data.sources import FileItems, GymItems, Item, open_items
from megarl.data.templates import render
from megarl.data.tokenizer import TOKENIZER_FILES, check_tokenizer_fits, load_tokenizer
from megarl.errors import UserError
from megarl.recipe.tables import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REDRAWS = 64  # at most half of a generator's prompts are held out: 2**-64 is the chance that 64 draws all meet them


def check_data(recipe: Recipe, hf: dict[str, Any]) -> None:
    """`UserError` for an unfit tokenizer, unreadable prompts, or prompts and responses longer than the model's context.

    hf: the model's settings, from `read_hf_config`.
    """
    tokenizer = load_tokenizer(recipe.model.tokenizer_path)
    check_tokenizer_fits(tokenizer, recipe.model.path)
    build_prompts(recipe, tokenizer).check(recipe.schedule.stages * recipe.candidates_per_stage)
    rollouts = recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens
    lengths = [("data.max_prompt_tokens + rollout.max_response_tokens", rollouts)]
    for suite in recipe.suites:
        what = f"{suite.place}: max_prompt_tokens + max_response_tokens"
        lengths.append((what, suite.data.max_prompt_tokens + suite.max_response_tokens))
    for what, longest in lengths:
        if longest > (context := hf["max_position_embeddings"]):
            raise UserError(f"{what} = {longest}, but {recipe.model.path} has max_position_embeddings = {context}")


@dataclass(frozen=True)
class Prompt:
    index: int  # position in the run's training order, or in the held-out list
    text: str
    tokens: tuple[int, ...]
    answer: str  # "" where the generator has no single right answer
    entry: dict[str, Any]  # what the verifier needs: the item of the data set and the generator's name


class PromptSource:
    """The prompts of a run: ``train(index)`` in training order, ``heldout(suite)`` to evaluate; no prompt is in both.

    Prompts with the same tokens are the same prompt: to a tokenizer that folds case, "Ada=" and "ada=" are one.
    """

    def __init__(
        self,
        items: GymItems | FileItems,
        heldout: dict[str, list[Prompt]],
        banned: list[Prompt],
        scorers: dict[str, Any],
        build: Callable[[int, Item, str], Prompt],
        seed: int,
    ) -> None:
        self._items, self._heldout, self._build, self._seed = items, heldout, build, seed
        self._banned = {prompt.tokens for prompt in banned}
        self.scorers = scorers  # generator name -> the reasoning-gym data set whose score_answer judges its responses

    def train(self, index: int) -> Prompt:
        """The index-th training prompt (0-based, unbounded)."""
        for attempt in range(REDRAWS):
            item = self._items.train(self._seed, index, attempt)
            prompt = self._build(index, item, f"training prompt {index}")
            if prompt.tokens not in self._banned:
                return prompt
        raise UserError(f"no training prompt {index}: {REDRAWS} draws all gave held-out prompts; lower eval.prompts")

    def check(self, count: int) -> None:
        """Build the first ``count`` prompts of a file, or the first one of a generator; `UserError` if one is unfit."""
        rows = len(self._items.rows) if isinstance(self._items, FileItems) else 1
        for index in range(min(count, rows)):
            self.train(index)

    def heldout(self, suite: str | None = None) -> list[Prompt]:
        """The prompts of a suite, by default of all suites, one after another."""
        return [prompt for name, prompts in self._heldout.items() if suite in (None, name) for prompt in prompts]


def build_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PromptSource:
    """Open the recipe's data; `UserError` for anything wrong with the file, the generator or the template."""
    build = functools.partial(_build_prompt, recipe, tokenizer)
    items = open_items(recipe.data.source, recipe.data.train, recipe.data.options)
    scorers = {items.name: items.scorer} if isinstance(items, GymItems) else {}
    heldout: dict[str, list[Prompt]] = {}
    banned: list[Prompt] = []
    for suite in recipe.suites:
        if not suite.own:
            heldout[suite.name] = _split(items, build, suite.prompts, suite.data.train)
            banned += heldout[suite.name]
            continue
        exam = open_items(suite.data.source, suite.data.train, suite.data.options)
        scorers |= {exam.name: exam.scorer} if isinstance(exam, GymItems) else {}
        ask = functools.partial(_build_prompt, recipe.model_copy(update={"data": suite.data}), tokenizer)
        candidates = itertools.islice(exam.candidates(), math.ceil(1.4 * suite.prompts))
        heldout[suite.name] = _distinct(candidates, ask, suite.prompts)
        banned += _as_trained(build, heldout[suite.name])
        _warn_if_fewer(len(heldout[suite.name]), suite.prompts, suite.data.train)
    if isinstance(items, FileItems) and banned:
        texts = {prompt.text for prompt in banned}
        items = FileItems([item for item in items.rows if render(recipe, tokenizer, item, "a row") not in texts])
        if not items.rows:
            raise UserError(
                f"every prompt of {recipe.data.train} is held out for evaluation; nothing is left to train on"
            )
    return PromptSource(items, heldout, banned, scorers, build, recipe.run.seed)


def _as_trained(build: Callable[..., Prompt], prompts: list[Prompt]) -> Iterator[Prompt]:
    """Of the prompts of a suite, which may have a template of its own, as they would look in training."""
    for prompt in prompts:
        with contextlib.suppress(UserError):  # its row has not even what the template of training needs
            yield build(prompt.index, prompt.entry, "a row")


@dataclass(frozen=True)
class _Opened:
    key: object
    tokenizer: PreTrainedTokenizerBase
    prompts: PromptSource


_last_opened: _Opened | None = None


def open_prompts(recipe: Recipe, tokenizer_dir: Path) -> tuple[PreTrainedTokenizerBase, PromptSource]:
    """The tokenizer of a directory and the recipe's prompts for it, as `load_tokenizer` and `build_prompts` make them.

    They are kept, and given again while recipe and files stay as they are: the forks of a process that has opened them
    neither read the prompt files nor draw the held-out prompts again.
    """
    global _last_opened
    key = recipe.model_dump_json(), _tokenizer_content(tokenizer_dir), _prompt_file_states(recipe)
    if _last_opened is None or _last_opened.key != key:
        tokenizer = load_tokenizer(tokenizer_dir)
        _last_opened = _Opened(key, tokenizer, build_prompts(recipe, tokenizer))
    return _last_opened.tokenizer, _last_opened.prompts


def _tokenizer_content(path: Path) -> dict[str, bytes]:
    """Of the files of a tokenizer: each policy of a run has a copy of them."""
    if not path.is_dir():
        return {}  # `load_tokenizer` says so
    return {f.name: f.read_bytes() for f in path.iterdir() if f.name.startswith(TOKENIZER_FILES) and f.is_file()}


def _prompt_file_states(recipe: Recipe) -> list[tuple[int, int]]:
    """Size and time of the last change of each; `RunDir.check_prompts` compares their contents."""
    files = [Path(name) for name in recipe.prompt_files() if Path(name).is_file()]
    return [(state.st_size, state.st_mtime_ns) for state in map(os.stat, files)]


def _split(items: GymItems | FileItems, build: Callable[..., Prompt], count: int, name: str) -> list[Prompt]:
    """Hold out ``count`` distinct prompts, but never more than half of what there is."""
    if isinstance(items, FileItems):
        heldout = _distinct(itertools.islice(items.candidates(), len(items.rows) // 2), build, count)
    else:
        # 2 n ln 2 = 1.39 n draws from 2 n prompts give n different ones. If more are needed, the generator has
        # fewer than 2 n, and half of those drawn are held out.
        heldout = _distinct(itertools.islice(items.candidates(), math.ceil(1.4 * count)), build, count)
        if len(heldout) < count:
            heldout = heldout[: len(heldout) // 2]
    if not heldout:
        raise UserError(f"{name} has too few different prompts to hold one out; give eval.suite or set eval.every = 0")
    _warn_if_fewer(len(heldout), count, name)
    return heldout


def _distinct(items: Iterable[Item], build: Callable[..., Prompt], count: int) -> list[Prompt]:
    found: dict[tuple[int, ...], Prompt] = {}
    for item in items:
        prompt = build(len(found), item, f"held-out prompt {len(found)}")
        found.setdefault(prompt.tokens, prompt)
        if len(found) == count:
            break
    return list(found.values())


def _warn_if_fewer(found: int, asked: int, name: str) -> None:
    if found < asked:
        warnings.warn(
            f"evaluation uses {found} distinct prompts of {name}; eval.prompts asks for {asked}", stacklevel=3
        )


def _build_prompt(recipe: Recipe, tokenizer: Any, index: int, item: Item, where: str) -> Prompt:
    text = render(recipe, tokenizer, item, where)
    tokens = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not tokens:
        raise UserError(f"{where} has no tokens: {text!r}")
    if len(tokens) > recipe.data.max_prompt_tokens:
        raise UserError(
            f"{where} has {len(tokens)} tokens, more than data.max_prompt_tokens = {recipe.data.max_prompt_tokens}: "
            f"{text[:80]!r}"
        )
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in tokens:
        warnings.warn(
            "the tokenizer does not know some characters of the prompts; the model cannot see them", stacklevel=2
        )
    return Prompt(index, text, tokens, item["answer"] or "", item)
