"""Where prompts come from: the generators of reasoning-gym and prompt files, both with random access to their items."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import math
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl.errors import UserError, nearest

MAX_LINE = 16 << 20  # bytes of a row of a .jsonl file: no prompt is as long, and a file that is no JSON lines has one
Item = dict[str, Any]  # {"question": str | chat messages, "answer": str, "metadata": dict}, as reasoning-gym has it

# reasoning-gym draws item i of a data set from Random(seed + i), so seeds next to each other share all but one of
# their items. Therefore seeds are used in blocks: 4096 for prompts of a run, then 4096 for spare items that replace
# prompts which turn out to be held out. Seeds stay below 2**32, as one generator (pool_matrix) passes them to NumPy.
BLOCK = 4096
BLOCK_SEEDS = 2 * BLOCK
HELDOUT_BLOCKS = 1024  # the first blocks are for evaluation, whatever run.seed is, so that runs can be compared
TRAIN_BLOCKS = 2**32 // BLOCK_SEEDS - HELDOUT_BLOCKS
BLOCKS_PER_RUN_SEED = 4096  # 16.8 million prompts before a run meets those of the next run.seed

# reasoning-gym 0.1.25: the items of these depend on the order of a Python set, hence on the hash seed of the process.
HASH_DEPENDENT = {"codeio", "isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder"}


class GymItems:
    """Items of one reasoning-gym generator. The last blocks are cached, so neighbouring items are cheap."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name = name
        self.block = functools.lru_cache(4)(lambda number: _gym_dataset(name, options, number * BLOCK_SEEDS))
        self.scorer = self.block(0)

    def train(self, seed: int, index: int, attempt: int) -> Item:
        """The index-th training item of a run with this seed; attempts above 0 give other items to replace it."""
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


class _LoadedWhenUsed(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def import_reasoning_gym() -> Any:
    """Without matplotlib, which takes half a second: cellpylib, which plots with it, is loaded when it is used."""
    sys.modules.setdefault("cellpylib", _LoadedWhenUsed("cellpylib"))
    import reasoning_gym

    return reasoning_gym


def _gym_dataset(name: str, options: dict[str, Any], seed: int) -> Any:
    reasoning_gym = import_reasoning_gym()
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        close = nearest(name, DATASETS)
        hint = f"; did you mean {close!r}?" if close else f"; known are {', '.join(sorted(DATASETS))}"
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


class FileItems:
    """Rows of a prompt file, in another order in each epoch."""

    def __init__(self, rows: list[Item]) -> None:
        self.rows = rows
        self.epoch = functools.lru_cache(2)(self._shuffled)

    def train(self, seed: int, index: int, attempt: int) -> Item:
        """As in `GymItems`."""
        number, position = divmod(index, len(self.rows))
        if attempt:
            return random.Random(f"{seed}/{index}/{attempt}").choice(self.rows)
        return self.rows[self.epoch(f"{seed}/{number}")[position]]

    def candidates(self) -> Iterator[Item]:
        """As in `GymItems`."""
        return (self.rows[row] for row in self._shuffled("held out"))

    def _shuffled(self, key: str) -> list[int]:
        order = list(range(len(self.rows)))
        random.Random(key).shuffle(order)
        return order


def read_prompt_file(path: Path) -> list[Item]:
    """Rows of a .jsonl or .parquet file: ``prompt`` (text or chat messages), ``answer``, other columns as metadata."""
    return [item for _, item in read_rows(path)]


def read_rows(path: Path) -> list[tuple[str, Item]]:
    """`read_prompt_file`, each row with its place: the file, and its line or row."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"{path}: a prompt file ends in .jsonl or .parquet")
    if not path.is_file():
        raise UserError(f"no prompt file {path}")
    rows = _read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path)
    try:
        items = [(where, _item_of_row(row, where)) for where, row in rows]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if not items:
        raise UserError(f"{path} holds no prompts")
    return items


def _read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    with open(path, "rb") as file:
        for number in itertools.count(1):
            line = file.readline(MAX_LINE + 1)
            if not line:
                return
            if len(line) > MAX_LINE:
                raise UserError(f"{path}, line {number} is longer than {MAX_LINE >> 20} MB")
            if not line.strip():
                continue
            try:
                yield f"{path}, line {number}", json.loads(line)
            except (ValueError, RecursionError) as error:
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
    number = isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer)
    if not number and not (isinstance(answer, str) and answer.strip()):
        raise UserError(f"{where}: answer must be a text or a finite number, got {answer!r:.60}")
    try:
        json.dumps(row, ensure_ascii=False, default=str).encode()
    except (ValueError, RecursionError) as error:  # half of a surrogate pair, which no tokenizer takes
        raise UserError(f"{where}: not valid text: {error}") from error
    metadata = {key: value for key, value in row.items() if key not in ("prompt", "answer")}
    return {"question": prompt, "answer": str(answer), "metadata": metadata}


def open_items(source: str, name: str, options: dict[str, Any]) -> GymItems | FileItems:
    """The items of a generator or of a file; `UserError` for anything wrong with either."""
    return GymItems(name, options) if source == "reasoning_gym" else FileItems(read_prompt_file(Path(name)))
