"""Selects responses of a run by filters, from the shards that the ledgers name, one shard at a time.

Only the needed columns are read: rewards are a separate column, and a mapped file costs no memory for tokens that no
filter needs. Checksums of shards are not verified, since that would read everything; `megarl audit` does it.
The run may be in progress. This module does not import torch.
"""

from __future__ import annotations

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
from megarl.storage.shards import Response, Shard

Decode = Callable[[np.ndarray], str]


@dataclass(frozen=True)
class Filter:
    """Conditions that a response must meet; None: any."""

    stage: int | None = None
    prompt: int | None = None  # group id
    sample: int | None = None  # number in its group
    reward: tuple[float, float] = (-math.inf, math.inf)  # both inclusive
    pattern: re.Pattern[str] | None = None  # must match somewhere in the text of the response


@dataclass(frozen=True)
class StoredResponse:
    """A response and its place in the run."""

    stage: int
    prompt: int  # group id
    sample: int
    prompt_tokens: np.ndarray  # [p] int32
    response: Response
    columns: dict[str, str | float | bool]  # of the prompt's row


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

    `UserError` if no stage has rollouts, or if the wanted stage or prompt has none.
    """
    there = stages(root)
    if not there:
        raise UserError(f"{root} has no rollouts yet")
    if wanted.stage is not None and wanted.stage not in there:
        others = f"stage{'s' * (len(there) > 1)} {', '.join(map(str, there))}"
        raise UserError(f"stage {wanted.stage} of {root} has no rollouts; those that have: {others}")
    seen = False
    for stage, directory in there.items():
        if wanted.stage is None or wanted.stage == stage:
            for entry in RolloutStore(directory, one_policy=False).entries:
                if wanted.prompt is None or wanted.prompt in entry.groups:
                    seen = True
                    yield from _of_shard(stage, directory, entry, wanted, decode)
    if wanted.prompt is not None and not seen:
        raise UserError(f"no stage of {root} has prompt {wanted.prompt}: `megarl samples {quoted(root)}` lists prompts")


def _of_shard(
    stage: int, directory: Path, entry: LedgerEntry, wanted: Filter, decode: Decode
) -> Iterator[StoredResponse]:
    shard = open_shard(directory, entry)
    rows = (shard.rewards >= wanted.reward[0]) & (shard.rewards <= wanted.reward[1])
    for prompt in entry.groups if wanted.prompt is None else (wanted.prompt,):
        group = None
        for sample, row in enumerate(shard.rows[prompt]):
            if rows[row] and wanted.sample in (None, sample):
                group = group or shard.group(prompt)
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
