"""Prompts: where they come from, in which order a run sees them, and which of them it never trains on.

A `PromptSource` is random access: the index-th prompt of a run depends on the recipe and the index alone, so a worker
that takes group 70000 builds that prompt and no other, and a resumed phase sees what the killed one saw.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import json
import math
import os
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import UserError
from megarl.recipe.tables import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = dict[str, Any]  # {"question": str | chat messages, "answer": str, "metadata": dict}, as reasoning-gym has it

# reasoning-gym draws item i of a data set from Random(seed + i), so seeds one apart share all but one of their items. A
# run owns blocks of seeds instead: block b holds 4096 prompts of the run and, behind them, 4096 spare items for the
# prompts that turn out to be held out. Seeds stay below 2**32 because one generator (pool_matrix) hands them to NumPy.
BLOCK = 4096
BLOCK_SEEDS = 2 * BLOCK
HELDOUT_BLOCKS = 1024  # the first blocks are evaluation's, the same ones for every run.seed, so that runs compare
TRAIN_BLOCKS = 2**32 // BLOCK_SEEDS - HELDOUT_BLOCKS
BLOCKS_PER_RUN_SEED = 4096  # 16.8 million prompts before a run meets those of the next run.seed
REDRAWS = 64  # at most half of a generator's prompts are held out: 2**-64 is the chance that 64 draws all meet them

# reasoning-gym 0.1.25: the items of these depend on the order of a Python set, hence on the hash seed of the process.
HASH_DEPENDENT = {"codeio", "isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder"}


@dataclass(frozen=True)
class Prompt:
    index: int  # position in the run's training order, or in the held-out list
    text: str
    tokens: tuple[int, ...]
    answer: str  # "" where the generator has no single right answer
    entry: dict[str, Any]  # what the verifier needs: the item of the data set and the generator's name


# ---------------------------------------------------------------------------------------------------------- tokenizer


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The Hugging Face tokenizer of a local directory; nothing is ever downloaded."""
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"no tokenizer: {path} is not a directory; set model.path or model.tokenizer")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception on a damaged tokenizer.json
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"cannot read a tokenizer from {path}: {reason[0]}") from error


def check_tokenizer_fits(tokenizer: PreTrainedTokenizerBase, model_dir: Path) -> None:
    """Raise `UserError` unless every token id is a row of the model's embedding and a response can end."""
    largest = max(tokenizer.get_vocab().values())
    vocab_size = _read_config(Path(model_dir) / "config.json").get("vocab_size")
    if not isinstance(vocab_size, int):
        raise UserError(f"{model_dir}/config.json: vocab_size is {vocab_size!r}, expected an integer")
    if largest >= vocab_size:
        raise UserError(
            f"the tokenizer does not fit the model: its largest token id is {largest}, but {model_dir}/config.json has "
            f"vocab_size = {vocab_size}; set model.tokenizer to the tokenizer that the model was trained with"
        )
    too_large = [token for token in stop_token_ids(tokenizer, model_dir) if token >= vocab_size]
    if too_large:
        raise UserError(f"stop token id {too_large[0]} is not below vocab_size = {vocab_size} of {model_dir}")


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model_dir: Path) -> tuple[int, ...]:
    """Token ids that end a response: the tokenizer's eos and those of generation_config.json and config.json."""
    ids = {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        path = Path(model_dir) / name
        eos = _read_config(path).get("eos_token_id") if path.exists() else None
        ids.update(eos if isinstance(eos, list) else [eos])
    ids.discard(None)
    if not ids:
        raise UserError(f"no stop token: neither the tokenizer nor {model_dir} names an eos token")
    return tuple(sorted(ids))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


# ---------------------------------------------------------------------------------------------------- reasoning-gym


class GymItems:
    """Items of one reasoning-gym generator. A block is made once and kept, so neighbours are cheap."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name = name
        self.block = functools.lru_cache(4)(lambda number: _gym_dataset(name, options, number * BLOCK_SEEDS))
        self.scorer = self.block(0)

    def train(self, seed: int, index: int, attempt: int) -> Item:
        number, item = divmod(index, BLOCK)
        if attempt:
            item = BLOCK + random.Random(f"{item}/{attempt}").randrange(BLOCK)
        return self._item(HELDOUT_BLOCKS + (seed * BLOCKS_PER_RUN_SEED + number) % TRAIN_BLOCKS, item)

    def candidates(self) -> Iterator[Item]:
        """Items that evaluation may take, in a fixed order."""
        for number in range(HELDOUT_BLOCKS):
            for item in range(BLOCK_SEEDS):
                yield self._item(number, item)

    def _item(self, number: int, item: int) -> Item:
        return {**self.block(number)[item], "generator": self.name}


def _gym_dataset(name: str, options: dict[str, Any], seed: int) -> Any:
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, 1, 0.4)
        hint = f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(DATASETS))}"
        raise UserError(f"reasoning-gym has no generator {name!r}{hint}")
    if reserved := {"seed", "size"} & options.keys():
        raise UserError(f"data.options: {sorted(reserved)[0]!r} is set by megarl; use run.seed")
    if name in HASH_DEPENDENT and not os.environ.get("PYTHONHASHSEED", "random").isdigit():
        raise UserError(
            f"reasoning-gym's {name!r} orders its items by Python's string hash, so a continued run would see other "
            "prompts: set PYTHONHASHSEED=0 in the environment"
        )
    try:
        if name == "composite" and "datasets" in options:
            options = {**options, "datasets": [DatasetSpec(**spec) for spec in options["datasets"]]}
        return reasoning_gym.create_dataset(name, seed=seed, size=BLOCK_SEEDS, **options)
    except (TypeError, ValueError, AssertionError) as error:
        known = ", ".join(f.name for f in fields(DATASETS[name][1]) if f.name not in ("seed", "size"))
        raise UserError(f"data.options do not suit the generator {name!r}: {error} (its options: {known})") from error


# ------------------------------------------------------------------------------------------------------------- files


class FileItems:
    """Rows of a file, in a new order each epoch."""

    def __init__(self, rows: list[Item]) -> None:
        self.rows = rows
        self.epoch = functools.lru_cache(2)(self._shuffled)

    def train(self, seed: int, index: int, attempt: int) -> Item:
        number, position = divmod(index, len(self.rows))
        if attempt:
            return random.Random(f"{seed}/{index}/{attempt}").choice(self.rows)
        return self.rows[self.epoch(f"{seed}/{number}")[position]]

    def candidates(self) -> Iterator[Item]:
        return (self.rows[row] for row in self._shuffled("held out"))

    def _shuffled(self, key: str) -> list[int]:
        order = list(range(len(self.rows)))
        random.Random(key).shuffle(order)
        return order


def read_prompt_file(path: Path) -> list[Item]:
    """Rows of a .jsonl or .parquet file: ``prompt`` (text or chat messages), ``answer``, other columns as metadata."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"{path}: a prompt file ends in .jsonl or .parquet")
    if not path.is_file():
        raise UserError(f"no prompt file {path}")
    rows = _read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path)
    items = [_item_of_row(row, where) for where, row in rows]
    if not items:
        raise UserError(f"{path} holds no prompts")
    return items


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield f"{path}, line {number}", json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}, line {number} is not JSON: {error}") from error


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if missing := {"prompt", "answer"} - set(table.column_names):
        raise UserError(f"{path}: no column {sorted(missing)[0]!r}; it has {', '.join(table.column_names)}")
    return ((f"{path}, row {number}", row) for number, row in enumerate(table.to_pylist(), 1))


def _item_of_row(row: Any, where: str) -> Item:
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object with prompt and answer, got {type(row).__name__}")
    for column in ("prompt", "answer"):
        if column not in row:
            raise UserError(f"{where}: no column {column!r}; it has {', '.join(row) or 'none'}")
    prompt, answer = row["prompt"], row["answer"]
    chat = isinstance(prompt, list) and all(isinstance(m, dict) and "role" in m and "content" in m for m in prompt)
    if not prompt or not (chat or isinstance(prompt, str)):
        raise UserError(
            f"{where}: prompt must be a text or a list of messages with role and content, got {prompt!r:.60}"
        )
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)) or not str(answer).strip():
        raise UserError(f"{where}: answer must be a text or a number, got {answer!r:.60}")
    metadata = {key: value for key, value in row.items() if key not in ("prompt", "answer")}
    return {"question": prompt, "answer": str(answer), "metadata": metadata}


# ----------------------------------------------------------------------------------------------------- prompt source


class PromptSource:
    """The prompts of a run: ``train(index)`` in training order, ``heldout()`` for evaluation, never a prompt in both.

    Two prompts are the same when their tokens are: a tokenizer that folds case makes one prompt of "Ada=" and "ada=".
    """

    def __init__(
        self, items: GymItems | FileItems, heldout: list[Prompt], build: Callable[[int, Item, str], Prompt], seed: int
    ) -> None:
        self._items, self._heldout, self._build, self._seed = items, heldout, build, seed
        self._banned = {prompt.tokens for prompt in heldout}
        self.scorers: dict[str, Any] = {}  # generator name -> the reasoning-gym data set whose score_answer judges it

    def train(self, index: int) -> Prompt:
        """The index-th training prompt (0-based, unbounded)."""
        for attempt in range(REDRAWS):
            item = self._items.train(self._seed, index, attempt)
            prompt = self._build(index, item, f"training prompt {index}")
            if prompt.tokens not in self._banned:
                return prompt
        raise UserError(f"no training prompt {index}: {REDRAWS} draws all gave held-out prompts; lower eval.prompts")

    def check(self, count: int) -> None:
        """Build the first ``count`` prompts of a file, or one of a generator; an unfit one is a `UserError`."""
        rows = len(self._items.rows) if isinstance(self._items, FileItems) else 1
        for index in range(min(count, rows)):
            self.train(index)

    def heldout(self) -> list[Prompt]:
        return list(self._heldout)


def build_prompts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PromptSource:
    """Open the recipe's data. Raises `UserError` for anything wrong with the file, the generator or the template."""
    build = functools.partial(_build_prompt, recipe, tokenizer)
    items = _open_items(recipe.data.source, recipe.data.train, recipe.data.options)
    scorers = {items.name: items.scorer} if isinstance(items, GymItems) else {}
    heldout: list[Prompt] = []
    if recipe.eval.every:
        source, suite = recipe.eval.source or recipe.data.source, recipe.eval.suite or recipe.data.train
        if (source, suite) == (recipe.data.source, recipe.data.train):
            heldout = _split(items, build, recipe.eval.prompts, suite)
        else:
            exam = _open_items(source, suite, recipe.data.options if suite == recipe.data.train else {})
            scorers |= {exam.name: exam.scorer} if isinstance(exam, GymItems) else {}
            candidates = itertools.islice(exam.candidates(), math.ceil(1.4 * recipe.eval.prompts))
            heldout = _distinct(candidates, build, recipe.eval.prompts)
            _say_if_fewer(len(heldout), recipe.eval.prompts, suite)
    if isinstance(items, FileItems) and heldout:
        texts = {prompt.text for prompt in heldout}
        items = FileItems([item for item in items.rows if _render(recipe, tokenizer, item, "a row") not in texts])
        if not items.rows:
            raise UserError(
                f"every prompt of {recipe.data.train} is held out for evaluation; nothing is left to train on"
            )
    prompts = PromptSource(items, heldout, build, recipe.run.seed)
    prompts.scorers = scorers
    return prompts


def _open_items(source: str, name: str, options: dict[str, Any]) -> GymItems | FileItems:
    return GymItems(name, options) if source == "reasoning_gym" else FileItems(read_prompt_file(Path(name)))


def _split(items: GymItems | FileItems, build: Callable[..., Prompt], count: int, name: str) -> list[Prompt]:
    """Hold out ``count`` distinct prompts, but never more than half of what there is."""
    if isinstance(items, FileItems):
        heldout = _distinct(itertools.islice(items.candidates(), len(items.rows) // 2), build, count)
    else:
        # From a list of 2 n words, 2 n ln 2 = 1.39 n draws show n different ones: who needs more has a shorter list.
        heldout = _distinct(itertools.islice(items.candidates(), math.ceil(1.4 * count)), build, count)
        if len(heldout) < count:
            heldout = heldout[: len(heldout) // 2]
    if not heldout:
        raise UserError(f"{name} has too few different prompts to hold one out; give eval.suite or set eval.every = 0")
    _say_if_fewer(len(heldout), count, name)
    return heldout


def _distinct(items: Iterable[Item], build: Callable[..., Prompt], count: int) -> list[Prompt]:
    found: dict[tuple[int, ...], Prompt] = {}
    for item in items:
        prompt = build(len(found), item, f"held-out prompt {len(found)}")
        found.setdefault(prompt.tokens, prompt)
        if len(found) == count:
            break
    return list(found.values())


def _say_if_fewer(found: int, asked: int, name: str) -> None:
    if found < asked:
        warnings.warn(
            f"evaluation uses {found} distinct prompts of {name}; eval.prompts asks for {asked}", stacklevel=3
        )


def _build_prompt(recipe: Recipe, tokenizer: Any, index: int, item: Item, where: str) -> Prompt:
    text = _render(recipe, tokenizer, item, where)
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


def _render(recipe: Recipe, tokenizer: Any, item: Item, where: str) -> str:
    template, question = recipe.data.prompt_template, item["question"]
    if isinstance(question, list):
        if not tokenizer.chat_template:
            raise UserError(f"{where} is a list of chat messages, but the tokenizer has no chat template")
        if template != "{prompt}":
            raise UserError("data.prompt_template cannot be combined with chat messages")
        return tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    known = {**item["metadata"], "prompt": question}
    try:
        return template.format(**known)
    except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
        raise UserError(
            f"data.prompt_template {template!r} does not fit {where} ({error}); known fields are "
            + ", ".join("{" + name + "}" for name in sorted(known))
        ) from error
