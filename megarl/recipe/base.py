"""The base class of all tables of a recipe, and what several of them say about unknown values."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import AfterValidator, BaseModel, ConfigDict

from megarl.errors import nearest


class Table(BaseModel):
    """A table of a recipe: immutable, without unknown keys, type conversions, NaN or infinities."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The question "did you mean NAME? "; "" if none of the ``known`` names is near."""
    close = nearest(name, known)
    return f"did you mean {close!r}? " if close else ""


def one_of(known: Iterable[str]) -> AfterValidator:
    """A validator for a string field: the value must be one of ``known``; the error suggests the nearest name."""

    def check(name: str) -> str:
        if name not in known:
            raise ValueError(f"unknown; {did_you_mean(name, known)}known are {', '.join(map(repr, known))}")
        return name

    return AfterValidator(check)
