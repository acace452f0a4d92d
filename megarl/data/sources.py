"""Sources of prompts with random access: generators of reasoning-gym, files, and mixtures of them."""

from __future__ import annotations

import functools
import json
import math
import os
import random
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from megarl.data.files import Item, read_rows
from megarl.errors import UserError, did_you_mean
from megarl.recipe.data_table import SourceTable

# reasoning-gym draws item i of a data set from Random(seed + i), so data sets with neighbouring seeds share all but one
# of their items. Therefore seeds are used in blocks: 4096 for prompts of a run, then 4096 for spare items that replace
# prompts which turn out to be held out. Seeds stay below 2**32, as one generator (pool_matrix) passes them to NumPy.
BLOCK = 4096
BLOCK_SEEDS = 2 * BLOCK
HELDOUT_BLOCKS = 1024  # the first blocks are for evaluation, whatever run.seed is, so that runs can be compared
TRAIN_BLOCKS = 2**32 // BLOCK_SEEDS - HELDOUT_BLOCKS
BLOCKS_PER_RUN_SEED = 4096  # a run has 16.8 million prompts before it meets those of the next run.seed

PATTERN = 1000  # in every so many prompts of a mixture each source has exactly its share

# Generators of reasoning-gym 0.1.25 whose items depend on the order of a Python set, hence on the process's hash seed.
HASH_DEPENDENT = {"codeio", "isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder"}


class GymItems:
    """Items of one reasoning-gym generator. The latest blocks are cached, so neighbouring items are cheap."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.name = name
        self.block = functools.lru_cache(4)(lambda number: _gym_dataset(name, options, number * BLOCK_SEEDS))
        self.scorer = self.block(0)

    def train(self, seed: int, index: int, attempt: int) -> Item:
        """The index-th training item of a run with this seed; an ``attempt`` above 0 gives a replacement for it."""
        number, item = divmod(index, BLOCK)
        if attempt:
            item = BLOCK + random.Random(f"{item}/{attempt}").randrange(BLOCK)
        return self._item(HELDOUT_BLOCKS + (seed * BLOCKS_PER_RUN_SEED + number) % TRAIN_BLOCKS, item)

    def candidates(self) -> Iterator[Item]:
        """Items from which held-out prompts are chosen, in a fixed order."""
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
        raise UserError(f"reasoning-gym has no generator {name!r}; {did_you_mean(name, sorted(DATASETS))}")
    if name in HASH_DEPENDENT and not os.environ.get("PYTHONHASHSEED", "random").isdigit():
        raise UserError(
            f"items of reasoning-gym's {name!r} depend on Python's string hashes, which change with each process, so a "
            "resumed run would see other prompts: set PYTHONHASHSEED=0 in the environment"
        )
    try:
        if name == "composite" and "datasets" in options:
            options = {**options, "datasets": [DatasetSpec(**spec) for spec in options["datasets"]]}
        return reasoning_gym.create_dataset(name, seed=seed, size=BLOCK_SEEDS, **options)
    except (TypeError, ValueError, AssertionError) as error:
        known = ", ".join(f.name for f in fields(DATASETS[name][1]) if f.name not in ("seed", "size"))
        raise UserError(f"data.options do not fit the generator {name!r}: {error} (its options: {known})") from error


class FileItems:
    """Rows of a prompt file, in a different random order in each epoch."""

    def __init__(self, rows: list[Item]) -> None:
        self.rows = rows
        self.epoch = functools.lru_cache(2)(functools.partial(shuffled, range(len(rows))))

    def train(self, seed: int, index: int, attempt: int) -> Item:
        """As in `GymItems`."""
        number, position = divmod(index, len(self.rows))
        if attempt:
            return random.Random(f"{seed}/{index}/{attempt}").choice(self.rows)
        return self.rows[self.epoch(f"{seed}/{number}")[position]]

    def candidates(self) -> Iterator[Item]:
        """As in `GymItems`."""
        return (self.rows[row] for row in shuffled(range(len(self.rows)), "held out"))


class Mixture:
    """Several sources, each with its share of the prompts.

    The shares are exact in every `PATTERN` prompts, in a different random order each time. The prompts of each source
    come in the same order as in a run on that source alone.
    """

    def __init__(self, sources: Sequence[GymItems | FileItems], weights: Sequence[float]) -> None:
        self.sources = list(sources)
        self.counts = shares(weights, PATTERN)
        if 0 in self.counts:
            raise UserError(f"a weight of [[data.sources]] is too small: it gives less than one of {PATTERN} prompts")
        pattern = tuple(source for source, count in enumerate(self.counts) for _ in range(count))
        self._pattern = functools.lru_cache(2)(functools.partial(shuffled, pattern))

    def locate(self, seed: int, index: int) -> tuple[int, int]:
        """(number of the source, index of the prompt within the source) of the index-th training prompt."""
        number, position = divmod(index, PATTERN)
        pattern = self._pattern(f"{seed}/{number}/sources")
        source = pattern[position]
        return source, number * self.counts[source] + pattern[:position].count(source)

    def train(self, seed: int, index: int, attempt: int) -> Item:
        """As in `GymItems`; a replacement comes from the same source."""
        source, nth = self.locate(seed, index)
        return self.sources[source].train(seed, nth, attempt)


def shuffled(values: Iterable[int], key: str) -> list[int]:
    """The values in a random order that depends only on ``key``."""
    order = list(values)
    random.Random(key).shuffle(order)
    return order


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Divide ``total`` by weights into whole numbers; the rest goes to the largest remainders."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda n: counts[n] - exact[n])
    for n in by_remainder[: total - sum(counts)]:
        counts[n] += 1
    return counts


def open_items(table: SourceTable, exam: bool = False) -> GymItems | FileItems:
    """Open a generator or a file; `UserError` for anything wrong with it. exam: as in `read_rows`."""
    if table.source == "reasoning_gym":
        return GymItems(table.train, table.options)
    name = Path(table.train).name
    rows = [{**item, "source": name} for _, item in read_rows(table, exam)]
    # DAPO-Math-17k as published repeats each question about 100 times: an update would train some of them twice
    different = {json.dumps(item, sort_keys=True, default=str): item for item in rows}
    if len(different) < len(rows):
        warnings.warn(
            f"{table.train} repeats {len(rows) - len(different)} of its {len(rows)} rows: each is used once",
            stacklevel=2,
        )
    return FileItems(list(different.values()))
