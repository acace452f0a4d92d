"""Fields of objective dataclasses with their allowed values, and the check whose error names a wrong value."""

from __future__ import annotations

import math
from dataclasses import field, fields
from typing import Any

from megarl.errors import UserError, did_you_mean


def number(default: float, low: float, high: float = math.inf) -> Any:
    """A float field in [low, high], both ends allowed."""
    return field(default=default, metadata={"low": low, "high": high})


def whole(default: int, low: int) -> Any:
    """An int field of at least ``low``."""
    return field(default=default, metadata={"least": low})


def choice(default: str, *others: str) -> Any:
    """A string field with the given values; the first is the default."""
    return field(default=default, metadata={"choices": (default, *others)})


def check_fields(settings: Any) -> None:
    """Raise `UserError` if a field of a frozen dataclass has a wrong type or value; ints in `number` fields become
    floats."""
    for f in fields(settings):
        value, owner = getattr(settings, f.name), f"{type(settings).__name__}.{f.name}"
        if "choices" in f.metadata and (not isinstance(value, str) or value not in f.metadata["choices"]):
            raise UserError(f"{owner} is {value!r}; {describe(f)}")
        if "least" in f.metadata and (type(value) is not int or value < f.metadata["least"]):
            raise UserError(f"{owner} is {value!r}; {describe(f)}")
        if "low" in f.metadata:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UserError(f"{owner} is {value!r}; {describe(f)}")
            if not f.metadata["low"] <= value <= f.metadata["high"]:
                raise UserError(f"{owner} is {value}; {describe(f)}")
            object.__setattr__(settings, f.name, float(value))


def describe(f: Any) -> str:
    """The allowed values of a field in words."""
    if "choices" in f.metadata:
        return f"expected one of {', '.join(f.metadata['choices'])}"
    if "least" in f.metadata:
        return f"expected a whole number of at least {f.metadata['least']}"
    return f"expected a number in [{f.metadata['low']}, {f.metadata['high']}]"


def build(cls: type, values: dict[str, Any], owner: str, also: tuple[str, ...] = ()) -> Any:
    """``cls(**values)``, with a `UserError` for an unknown key that names the nearest known one (or one of `also`)."""
    known = [*(f.name for f in fields(cls)), *also]
    for key in values:
        if key not in known:
            raise UserError(f"{owner} has no field {key!r}; {did_you_mean(key, known)}")
    return cls(**values)
