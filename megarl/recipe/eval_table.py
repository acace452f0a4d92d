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
    """``[[eval.suites]]``: prompts that are evaluated together. What it leaves out is as in ``[eval]``."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$", max_length=64)  # of its folder in the run directory
    source: Literal["file", "reasoning_gym"] | None = None  # default: [data] source
    suite: str | None = None  # file or generator; default: held-out prompts of [data] train
    data: dict[str, Any] = Field({})  # other keys of [data] for this file or generator; the rest is as in [data]
    prompts: int | None = Field(None, ge=1, le=10**6)
    samples: int | None = Field(None, ge=1, le=10**5)
    temperature: float | None = Field(None, gt=0)
    top_p: float | None = Field(None, gt=0, le=1)
    greedy: bool | None = None
    max_response_tokens: int | None = Field(None, ge=1, le=10**9)


class EvalTable(Table):
    """Without ``suites`` its keys describe the one suite, with them what a suite leaves out."""

    source: Literal["file", "reasoning_gym"] | None = None  # default: [data] source
    suite: str | None = None  # file or generator; default: held-out prompts of [data] train
    data: dict[str, Any] = Field({})  # other keys of [data] for this file or generator; the rest is as in [data]
    prompts: int = Field(1024, ge=1, le=10**6)
    samples: int = Field(1, ge=1, le=10**5)  # n responses to a prompt; avg@n, maj@n, and pass@k for k up to n
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)  # sample among the most probable tokens with this probability together
    greedy: bool = False  # the most probable token each time: one response to a prompt
    max_response_tokens: int | None = Field(None, ge=1, le=10**9)  # default: that of [rollout]
    best: Literal["first", "mean"] = "first"  # best/ has the highest accuracy on the first suite, or on the mean of all
    every: int = Field(1, ge=0)  # stages
    every_updates: int = Field(0, ge=0)  # also after each so many updates of the run; 0 in both turns evaluation off
    suites: list[SuiteTable] = Field([])

    @property
    def on(self) -> bool:
        """Whether anything is ever evaluated."""
        return self.every > 0 or self.every_updates > 0

    @model_validator(mode="after")
    def _suites_are_whole(self) -> EvalTable:
        if self.suites and (self.suite or self.source or self.data):
            raise ValueError("suite, source and data stand in each of [[eval.suites]], where there are any")
        tables: list[EvalTable | SuiteTable] = [self, *self.suites]
        for table in tables:
            where = f"suite {table.name!r}: " if isinstance(table, SuiteTable) else ""
            if table.data and not table.suite:
                raise ValueError(f"{where}data is for a suite of its own: held-out prompts are those of [data]")
            if wrong := {"source", "train", "sources"} & table.data.keys():
                raise ValueError(f"{where}data.{min(wrong)}: say suite = FILE OR GENERATOR, and source, instead")
            if table.greedy and (table.samples or 1) > 1:
                raise ValueError(f"{where}greedy = true gives the same response again: leave out samples")
        names = [table.name for table in self.suites]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two suites have the name {repeated[0]!r}")
        return self


@dataclass(frozen=True)
class Suite:
    """A suite with everything that its table leaves out."""

    name: str
    place: str  # in the recipe, for messages
    own: bool  # False: held out of the training prompts
    data: DataTable  # of its prompts
    prompts: int
    samples: int
    temperature: float  # 0: greedy
    top_p: float
    max_response_tokens: int


def make_suites(table: EvalTable, data: DataTable, max_response_tokens: int) -> list[Suite]:
    """All suites of a recipe; none where evaluation is off. The rest: what ``[data]`` and ``[rollout]`` say."""
    suites: list[SuiteTable | None] = [*table.suites] or [None]
    return [_make(table, suite, data, max_response_tokens) for suite in suites if table.on]


def _make(shared: EvalTable, own: SuiteTable | None, data: DataTable, max_response_tokens: int) -> Suite:
    table, place = own or shared, f"eval.suites {own.name!r}" if own else "[eval]"
    if table.suite and not (table.source or data.source):
        raise ValueError(f'{place.strip("[]")}.source: "file" or "reasoning_gym", which {table.suite!r} is')
    described = {"source": table.source or data.source, "train": table.suite or data.train, **table.data}
    apart = any(getattr(data, key, None) != value for key, value in described.items())
    name = own.name if own else default_name(str(described["source"]), str(described["train"])) if apart else HELDOUT

    def setting(name: str) -> Any:
        value = getattr(own, name) if own else None
        return getattr(shared, name) if value is None else value

    greedy = setting("greedy")
    return Suite(
        name=name,
        place=place,
        own=apart,
        data=_merged(data, described, place) if apart else data,
        prompts=setting("prompts"),
        samples=1 if greedy else setting("samples"),
        temperature=0.0 if greedy else setting("temperature"),
        top_p=1.0 if greedy else setting("top_p"),
        max_response_tokens=setting("max_response_tokens") or max_response_tokens,
    )


def _merged(data: DataTable, changes: dict[str, Any], place: str) -> DataTable:
    """``data`` with other prompts; ValueError for what is no key of it."""
    kept = {key: value for key, value in data.model_dump().items() if key not in (*OF_A_SOURCE, "sources")}
    try:
        return DataTable.model_validate(kept | changes)
    except ValidationError as error:
        key, message = ".".join(map(str, error.errors()[0]["loc"])), error.errors()[0]["msg"]
        raise ValueError(f"{place} data.{key}: {message.removeprefix('Value error, ')}") from error


def default_name(source: str, data: str) -> str:
    """Of the suite of a file or generator that was given no name."""
    name = re.sub(r"[^A-Za-z0-9_.+-]", "_", Path(data).stem if source == "file" else data)[:64]
    return name if name[:1].isalnum() else f"suite{name}"[:64]
