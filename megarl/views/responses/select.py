"""Selects responses of a run by filters, from the shards that the ledgers name, one shard at a time.

Only the needed columns are read: lengths and rewards are separate columns, and a mapped file costs no memory for tokens
that no filter needs. Checksums of shards are not verified, since that would read everything; `megarl audit` does it.
The run may be in progress. This module does not import torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.data.tokenizer import load_decoder
from megarl.errors import UserError
from megarl.foreign import quoted
from megarl.recipe.load import read_tables
from megarl.storage.ledger import LedgerEntry, check_size
from megarl.storage.rollouts import RolloutStore
from megarl.storage.shards import FINISH_REASONS, UNFINISHED, Group, Response, Shard

Decode = Callable[[np.ndarray], str]


@dataclass(frozen=True)
class Filter:
    """Conditions that a response must meet; None: any."""

    stage: int | None = None
    prompt: int | None = None  # group id
    sample: int | None = None  # number in its group
    reward: tuple[float, float] = (-math.inf, math.inf)  # both inclusive
    finish: str | None = None
    longer: int = 0  # tokens, more than this
    shorter: int | None = None  # tokens, fewer than this
    pattern: re.Pattern[str] | None = None  # must match somewhere in the text of the response
    columns: tuple[tuple[str, str], ...] = ()  # (column of the prompt's row, its value as text)

    def prompt_is_wanted(self, group: Group) -> bool:
        """Whether the prompt's row meets the conditions on ``columns``."""
        row = group.columns if self.columns else {}
        return all(name in row and _text(row[name]) == value for name, value in self.columns)

    def rows(self, shard: Shard) -> np.ndarray:
        """[rows of the shard] bool: which rows meet the conditions on reward, length and finish reason."""
        lengths = np.diff(shard.tokens[0])
        found = (shard.rewards >= self.reward[0]) & (shard.rewards <= self.reward[1]) & (lengths > self.longer)
        if self.shorter is not None:
            found &= lengths < self.shorter
        if self.finish is not None:
            found &= np.array([reason == self.finish for reason in shard.finish_reasons])
        return found


@dataclass(frozen=True)
class StoredResponse:
    """A response and its place in the run."""

    stage: int
    prompt: int  # group id
    sample: int
    prompt_tokens: np.ndarray  # [p] int32
    response: Response
    columns: dict[str, str | float | bool]  # of the prompt's row


def _text(value: str | float | bool) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def title(one: StoredResponse) -> str:
    """Reward, length and finish reason of a response, as one line of text."""
    response = one.response
    right = "" if response.correct is None else f" ({'right' if response.correct else 'wrong'})"
    return f"reward {response.reward:g}{right} · {len(response.tokens):,} tokens · {response.finish_reason}"


def stages(root: Path) -> dict[int, Path]:
    """{stage: directory of its rollouts}, for the stages that have some; `UserError` if ``root`` is not a run."""
    if not (root / "recipe.toml").is_file():
        raise UserError(f"{root} is not a run directory: it has no recipe.toml")
    found = (path for path in root.glob("stages/[0-9]*/rollouts") if path.is_dir())
    return {int(path.parent.name): path for path in sorted(found)}


def decoder(root: Path) -> Decode:
    """A function from tokens to text, by the tokenizer of the run's first policy or else of its recipe."""
    place = root / "stages/000/policy"
    if not place.is_dir():
        model = read_tables(root / "recipe.toml")["model"]
        place = Path(model.get("tokenizer") or model["path"])
    decode = load_decoder(place)
    return lambda tokens: decode(tokens.tolist())


def select(root: Path, wanted: Filter, decode: Decode) -> Iterator[StoredResponse]:
    """The responses that meet ``wanted``, in the order of stage, prompt and sample.

    `UserError` if no stage has rollouts, if the wanted stage or prompt has none, for an unknown finish reason, or
    for a column that no prompt's row has.
    """
    if wanted.finish not in (None, *FINISH_REASONS):
        raise UserError(f"a response does not end with {wanted.finish!r}, but with {', '.join(FINISH_REASONS)}")
    there = stages(root)
    if not there:
        raise UserError(f"{root} has no rollouts yet")
    if wanted.stage is not None and wanted.stage not in there:
        raise UserError(f"stage {wanted.stage} of {root} has no rollouts; those that have: {_numbers(list(there))}")
    seen = found = False
    for stage, directory in there.items():
        if wanted.stage is None or wanted.stage == stage:
            directory = directory / "unfinished" if wanted.finish == UNFINISHED else directory
            for entry in RolloutStore(directory, one_policy=False).entries if directory.exists() else ():
                if wanted.prompt is None or wanted.prompt in entry.groups:
                    seen = True
                    for one in _of_shard(stage, directory, entry, wanted, decode):
                        found = True
                        yield one
    if wanted.prompt is not None and not seen:
        raise UserError(f"no stage of {root} has prompt {wanted.prompt}: `megarl samples {quoted(root)}` lists prompts")
    if wanted.columns and not found:
        every = select(root, Filter(wanted.stage, wanted.prompt), decode)
        known = sorted({name for one in every for name in one.columns})
        for name, _ in wanted.columns:
            if name not in known:
                raise UserError(f"no prompt has a column {name!r}; the columns are: {', '.join(known) or 'none'}")


def _numbers(stages: list[int]) -> str:
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"


def _of_shard(
    stage: int, directory: Path, entry: LedgerEntry, wanted: Filter, decode: Decode
) -> Iterator[StoredResponse]:
    shard = open_shard(directory, entry)
    rows = wanted.rows(shard)
    for prompt in entry.groups if wanted.prompt is None else (wanted.prompt,):
        group = None
        for sample, row in enumerate(shard.rows[prompt]):
            if rows[row] and wanted.sample in (None, sample):
                group = group or shard.group(prompt)
                if not wanted.prompt_is_wanted(group):
                    break
                response = group.responses[sample]
                if wanted.pattern is None or wanted.pattern.search(decode(response.tokens)):
                    yield StoredResponse(stage, prompt, sample, group.prompt_tokens, response, group.columns)


def open_shard(directory: Path, entry: LedgerEntry) -> Shard:
    """The mapped shard of a line of the ledger; `UserError` if its size or its groups differ from the line."""
    check_size(directory / entry.shard, entry)
    try:
        shard = Shard.open(directory / entry.shard)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{directory / entry.shard} is damaged: {error}; `megarl audit` gives details") from error
    if tuple(shard.rows) != entry.groups:
        raise UserError(f"{directory / entry.shard} has other groups than its line in the ledger; see `megarl audit`")
    return shard
