"""``[eval]``: which prompts are held out of training or read for evaluation, and how responses to them are sampled."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from megarl.recipe.base import Table
from megarl.recipe.data_table import OF_A_SOURCE, DataTable

HELDOUT = "heldout"  # the suite of prompts that are held out of [data] train


class SuiteTable(Table):
    """``[[eval.suites]]``: a set of prompts that are evaluated together. Keys that it omits default to ``[eval]``."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$", max_length=64)  # also of its folder in evaluations/
    source: Literal["file", "reasoning_gym"] | None = None  # default: [data] source
    suite: str | None = None  # file or generator; default: held-out prompts of [data] train
    data: dict[str, Any] = Field({})  # other keys of [data] for this file or generator; the rest is as in [data]
    prompts: int | None = Field(None, ge=1, le=10**6)  # default of this and all that follow: that of [eval]
    samples: int | None = Field(None, ge=1, le=10**5)  # responses to a prompt
    temperature: float | None = Field(None, ge=1e-4)
    top_p: float | None = Field(None, gt=0, le=1)
    greedy: bool | None = None
    max_response_tokens: int | None = Field(None, ge=1, le=10**9)


class EvalTable(Table):
    """``[eval]``: the single suite, or with ``suites`` the defaults of each, and when to evaluate."""

    source: Literal["file", "reasoning_gym"] | None = None  # default: [data] source
    suite: str | None = None  # file or generator; default: held-out prompts of [data] train
    # other keys of [data] for this file or generator; the rest is as in [data]. With ``suites`` of all that have a file
    data: dict[str, Any] = Field({})
    prompts: int = Field(1024, ge=1, le=10**6)  # how many
    samples: int = Field(1, ge=1, le=10**5)  # n responses to a prompt; gives avg@n, maj@n, and pass@k for k up to n
    temperature: float = Field(1.0, ge=1e-4)  # of sampling
    top_p: float = Field(1.0, gt=0, le=1)  # nucleus sampling: from the top tokens with this total probability
    greedy: bool = False  # greedy decoding, one response to a prompt
    max_response_tokens: int | None = Field(None, ge=1, le=10**9)  # default: that of [rollout]
    best: Literal["first", "mean"] = "first"  # best/ is chosen by accuracy on the first suite, or by the mean over all
    every: int = Field(1, ge=0)  # evaluate each time after this many stages
    every_updates: int = Field(0, ge=0)  # also each time after this many updates; 0 in both turns evaluation off
    suites: list[SuiteTable] = Field([])

    @property
    def on(self) -> bool:
        """Whether anything is ever evaluated."""
        return self.every > 0 or self.every_updates > 0

    @model_validator(mode="after")
    def _suites_are_whole(self) -> EvalTable:
        if self.suites and (self.suite or self.source):
            raise ValueError("with [[eval.suites]], set suite and source in each of them instead of in [eval]")
        tables: list[EvalTable | SuiteTable] = [self, *self.suites]
        for table in tables:
            where = f"suite {table.name!r}: " if isinstance(table, SuiteTable) else ""
            if table.data and not (table.suite or (table is self and self.suites)):
                raise ValueError(
                    f"{where}data needs suite = FILE OR GENERATOR: without it the suite is held-out prompts of [data]"
                )
            if wrong := {"source", "train", "sources"} & table.data.keys():
                raise ValueError(f"{where}data.{min(wrong)}: set suite = FILE OR GENERATOR, and source, instead")
            if table.greedy and (table.samples or 1) > 1:
                raise ValueError(f"{where}greedy = true gives the same response every time: leave out samples")
        names = [table.name for table in self.suites]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two suites have the name {repeated[0]!r}")
        return self


@dataclass(frozen=True)
class Suite:
    """A suite with all its defaults filled in."""

    name: str
    where: str  # in the recipe, for error messages
    own: bool  # whether it has prompts of its own; False: prompts held out of training
    data: DataTable  # how its prompts are read
    prompts: int
    samples: int  # responses to each prompt
    temperature: float  # 0: greedy decoding
    top_p: float
    max_response_tokens: int


def make_suites(table: EvalTable, data: DataTable, max_response_tokens: int) -> list[Suite]:
    """All suites of a recipe; none if evaluation is off. data, max_response_tokens: those of training."""
    suites: list[SuiteTable | None] = [*table.suites] or [None]
    return [_make(table, suite, data, max_response_tokens) for suite in suites if table.on]


def _make(shared: EvalTable, own: SuiteTable | None, data: DataTable, max_response_tokens: int) -> Suite:
    table, where = own or shared, f"eval.suites {own.name!r}" if own else "[eval]"
    if table.suite and not (table.source or data.source):
        raise ValueError(f'{where.strip("[]")}.source: set "file" or "reasoning_gym", whichever {table.suite!r} is')
    changes = {**shared.data, **table.data} if table.suite else {}
    described = {"source": table.source or data.source, "train": table.suite or data.train, **changes}
    apart = any(getattr(data, key, None) != value for key, value in described.items())
    name = own.name if own else default_name(str(described["source"]), str(described["train"])) if apart else HELDOUT
    given = shared.model_dump() | (own.model_dump(exclude_none=True) if own else {})
    greedy = given["greedy"]
    return Suite(
        name=name,
        where=where,
        own=apart,
        data=_merged(data, described, where) if apart else data,
        prompts=given["prompts"],
        samples=1 if greedy else given["samples"],
        temperature=0.0 if greedy else given["temperature"],
        top_p=1.0 if greedy else given["top_p"],
        max_response_tokens=given["max_response_tokens"] or max_response_tokens,
    )


def _merged(data: DataTable, changes: dict[str, Any], where: str) -> DataTable:
    """``[data]`` for the prompts of a suite: ``changes`` describe them. ValueError for a wrong key or value."""
    kept = {key: value for key, value in data.model_dump().items() if key not in (*OF_A_SOURCE, "sources")}
    try:
        return DataTable.model_validate(kept | changes)
    except ValidationError as error:
        key, message = ".".join(map(str, error.errors()[0]["loc"])), error.errors()[0]["msg"]
        raise ValueError(f"{where} data.{key}: {message.removeprefix('Value error, ')}") from error


def default_name(source: str, data: str) -> str:
    """The name of a suite that was given none: that of its generator, or of its file without suffix."""
    name = re.sub(r"[^A-Za-z0-9_.+-]", "_", Path(data).stem if source == "file" else data)[:64]
    return name if name[:1].isalnum() else f"suite{name}"[:64]
