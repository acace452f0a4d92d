"""The base class of all tables of a recipe, and a validator for names."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import AfterValidator, BaseModel, ConfigDict

from megarl.errors import did_you_mean


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


def one_of(known: Iterable[str]) -> AfterValidator:
    """A validator for a string field: the value must be one of ``known``; the error suggests the nearest name."""

    def check(name: str) -> str:
        if name not in known:
            raise ValueError(f"unknown; {did_you_mean(name, known)}")
        return name

    return AfterValidator(check)
