"""Sweep files: which combinations of settings to run and compare. They are checked like recipes."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from megarl.errors import UserError, did_you_mean
from megarl.recipe.base import Table
from megarl.recipe.load import Setting, read_tables, validate
from megarl.recipe.tables import Recipe

BASE = "base"  # the directory of the runs whose rollouts the points share
_LABEL = re.compile(r"[A-Za-z0-9][\w.+-]*")  # valid as a part of a directory's name
Tables = dict[str, dict[str, Any]]  # section -> key -> value


class SweepTable(Table):
    """A sweep: every combination of one value of each axis is a point, which is run once per seed.

    Without ``stage`` a point is a whole run. With it one run per seed generates rollouts up to that stage, and all
    points optimise that stage's rollouts.
    """

    recipe: Path = Field(strict=False)
    stage: int | None = Field(None, ge=0)  # the stage whose sealed rollouts every point optimises; default: whole runs
    seeds: tuple[int, ...] = Field((), strict=False)  # values of run.seed; default: the recipe's
    baseline: str | None = None  # the name of the point that the others are compared with; default: the first
    set: Tables = Field({})  # settings of every point
    # either a setting and its values, "optimizer.lr" = [1e-4, 3e-4]; or names of values, each with its settings
    axes: dict[str, list[Any] | dict[str, Tables]]

    @field_validator("axes", mode="before")
    @classmethod
    def _axes_are_lists_or_named_tables(cls, axes: Any) -> Any:
        for name, axis in axes.items() if isinstance(axes, dict) else ():
            if not axis or not isinstance(axis, list | dict):
                raise ValueError(f"{name}: expected a list of values, or a table of names and settings")
            if isinstance(axis, list) and name.count(".") != 1:
                raise ValueError(
                    f"{name}: the name of a list must be a setting, in quotes and with its table, as in "
                    '"optimizer.lr" = [1e-4, 3e-4]'
                )
            for label in axis if isinstance(axis, dict) else ():
                if isinstance(axis[label], list):
                    raise ValueError(f'{name}.{label} is a list: put quotes around the setting, "{name}.{label}" = ...')
        return axes

    @model_validator(mode="after")
    def _points_agree(self) -> SweepTable:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: one of them is listed twice")
        points = [point.name for point in self.points()]
        if len(set(points)) < len(points):
            raise ValueError("axes: two points have the same name")
        if BASE in points:
            raise ValueError(f"axes: a point cannot be called {BASE!r}, which names the runs whose rollouts are shared")
        if self.baseline is not None and self.baseline not in points:
            hint = did_you_mean(self.baseline, points)
            raise ValueError(f"baseline = {self.baseline!r} is not the name of a point; {hint}")
        return self

    def points(self) -> list[Point]:
        """Every combination of the axes' values; the last axis varies fastest."""
        return [
            Point(
                {axis: value for part in parts for axis, value in part.values.items()},
                ",".join(part.name for part in parts),
                sum((part.settings for part in parts), _settings(self.set)),
            )
            for parts in itertools.product(*itertools.starmap(_values, self.axes.items()))
        ]

    @property
    def reference(self) -> str:
        """The name of the point that the others are compared with."""
        return self.baseline or self.points()[0].name


@dataclass(frozen=True)
class Point:
    """One combination of the axes' values."""

    values: dict[str, Any]  # axis -> its value, or the value's name
    name: str
    settings: tuple[Setting, ...]  # those of ``set``, then those of each axis


def load_sweep(path: Path) -> SweepTable:
    """Read a sweep file; `UserError` for mistakes, except in settings: these are checked with a whole recipe."""
    return validate(read_tables(path, "sweep"), SweepTable, "sweep")


def _settings(tables: Tables) -> tuple[Setting, ...]:
    return tuple((f"{section}.{key}", value) for section, keys in tables.items() for key, value in keys.items())


def _values(axis: str, values: list[Any] | dict[str, Tables]) -> list[Point]:
    """The points of one axis alone."""
    if isinstance(values, dict):
        return [Point({axis: name}, _label(axis, name), _settings(own)) for name, own in values.items()]
    key = axis.rpartition(".")[2]
    texts = [str(value).lower() if isinstance(value, bool) else str(value) for value in values]
    return [
        Point({axis: value}, _label(axis, f"{key}={text}"), ((axis, value),))
        for value, text in zip(values, texts, strict=True)
    ]


def _label(axis: str, label: str) -> str:
    if not all(map(_LABEL.fullmatch, label.split("=", 1))):
        raise ValueError(
            f"axes.{axis}: {label!r} cannot be part of a directory's name: instead of a list use a table of names and "
            "settings, with only letters, digits, _, dots, + and - in the names"
        )
    return label


def seeds_of(table: SweepTable, recipe: Recipe) -> tuple[int, ...]:
    """The seeds of a sweep over ``recipe``."""
    seeds = table.seeds or (recipe.run.seed,)
    if any(name == "run.seed" for point in table.points() for name, _ in point.settings):
        raise UserError("run.seed: set the seeds with seeds = [...] of the sweep, not as a setting of its points")
    return seeds
