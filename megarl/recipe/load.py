"""Reads, overrides, checks, writes and compares recipe files, so that mistakes are reported before a process starts.

Imports no engine. The fields of ``[objective]`` are checked last, because the objectives need torch.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args

import tomli_w
from pydantic import BaseModel, ValidationError

import megarl
from megarl.errors import UserError, did_you_mean, nearest
from megarl.foreign import parse_toml, read_file
from megarl.own_file import absolute, is_own
from megarl.recipe.data_table import MESSAGES
from megarl.recipe.tables import ObjectiveTable, Recipe

AnyTable = TypeVar("AnyTable", bound=BaseModel)
Setting = tuple[str, Any]  # "section.key" and its value
Overrides = Sequence[str | Setting]  # a string has the form ``section.key=value``, with a TOML value


def load_recipe(path: Path, overrides: Overrides = ()) -> Recipe:
    """Read a TOML recipe, apply overrides and check the result. Raises `UserError` with one line per mistake.

    Relative paths, such as ``[model] path`` and ``[data] train``, are taken from the working directory, as on the
    command line, and made absolute.
    """
    tables = read_tables(path)
    apply_overrides(tables, overrides)
    return parse_recipe(tables)


def load_without_objective(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """`load_recipe` for environments without torch: ignores the objective's name and its specific fields."""
    shared = set(ObjectiveTable.model_fields) - {"name"}
    tables = read_tables(path)
    if isinstance(objective := tables.pop("objective", {}), dict):
        tables["objective"] = {key: value for key, value in objective.items() if key in shared}
    for override in overrides:
        section, _, rest = override.partition(".")
        if section != "objective" or rest.partition("=")[0].strip() in shared:
            _apply_override(tables, parse_override(override))
    return _validate(tables)


def shipped(folder: str) -> Path:
    """The folder ``examples`` or ``docs``, which a wheel has in the package, and a clone beside it."""
    package = Path(megarl.__file__).parent
    return next(path for path in (package / folder, package.parent / folder) if path.is_dir())


def read_tables(path: Path, kind: str = "recipe") -> dict[str, Any]:
    """Parse a TOML file without checking its keys; `UserError` if it cannot be read.

    kind: the kind of file, for error messages.
    """
    try:
        return parse_toml(read_file(path))
    except OSError as error:
        raise UserError(f"cannot read the {kind} {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error


def override_recipe(recipe: Recipe, overrides: Overrides) -> Recipe:
    """A copy of the recipe with ``overrides`` applied, checked again."""
    tables = tomllib.loads(dump_recipe(recipe))
    apply_overrides(tables, overrides)
    return parse_recipe(tables)


def _absolute_paths(recipe: Recipe) -> Recipe:
    """Make all paths absolute, because a run can be resumed from any directory.

    Links to files are kept: those of a Hugging Face cache lead to files whose names have no suffix.
    """

    def full(path: Any) -> str:
        return str(Path(path).absolute())

    tables = recipe.model_dump()
    model, data, evaluation, reward = (tables[name] for name in ("model", "data", "eval", "reward"))
    model |= {name: os.path.realpath(path) for name, path in model.items() if path}
    for source in (data, *data["sources"]):
        if source["source"] == "file" and source["train"]:
            source["train"] = full(source["train"])
    suites = (evaluation, *evaluation["suites"])
    for suite in suites:
        if suite["suite"] and (suite["source"] or data["source"]) == "file":
            suite["suite"] = full(suite["suite"])
    for table in (data, *(suite["data"] for suite in suites)):
        if table.get("template", "raw") not in MESSAGES:
            table["template"] = full(table["template"])
    objective = tables["objective"]
    own = [(table, "path") for table in (objective, reward, *reward["parts"])]
    for table, key in (*own, (objective, "advantage")):
        if table[key] and is_own(table[key]):
            table[key] = absolute(table[key])
    if reward["service"] and reward["service"]["prompt"]:
        reward["service"]["prompt"] = full(reward["service"]["prompt"])
    rollout = tables["rollout"]
    rollout |= {key: full(path) for key, path in rollout.items() if key.endswith("_python") and path}
    return Recipe.model_validate(tables)


def _validate(tables: dict[str, Any]) -> Recipe:
    return _absolute_paths(validate(tables, Recipe, "recipe"))


def validate(tables: dict[str, Any], kind: type[AnyTable], name: str) -> AnyTable:
    """Check the tables of a file against the model ``kind``; `UserError` with one line per mistake.

    name: the kind of file, for error messages.
    """
    try:
        return kind.model_validate(tables)
    except ValidationError as error:
        lines = ["  " + explain(dict(e), kind, name) for e in error.errors()]
        raise UserError(f"the {name} is wrong:\n" + "\n".join(lines)) from error


def parse_recipe(tables: dict[str, Any]) -> Recipe:
    """Check a recipe and fill in every field of its objective; `UserError` with one line per mistake."""
    recipe = _validate(tables)
    from megarl.objectives import build_objective, resolved_fields  # imports torch, so after all other checks

    fields = resolved_fields(build_objective(recipe.objective.definition, recipe.objective.fields))
    kept = recipe.objective.model_dump(exclude=set(recipe.objective.fields))
    return recipe.model_copy(update={"objective": ObjectiveTable.model_validate(kept | fields)})


def dump_recipe(recipe: Recipe) -> str:
    """The fully resolved recipe as TOML; optional keys that are not set are left out."""
    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True))


def recipe_diff(old: Recipe, new: Recipe) -> list[str]:
    """Lines ``section.key: old -> new`` for every setting in which two recipes differ."""
    a, b = flatten(old.model_dump(mode="json")), flatten(new.model_dump(mode="json"))
    return [f"{k}: {a.get(k)!r} -> {b.get(k)!r}" for k in sorted(a | b) if a.get(k) != b.get(k)]


def flatten(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"section.key": value} of nested tables."""
    flat: dict[str, Any] = {}
    for key, value in tables.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def apply_overrides(tables: dict[str, Any], overrides: Overrides) -> None:
    """Apply overrides to ``tables`` in place. A change of the objective drops the previous objective's own fields, and
    so goes before all others."""
    others = {"objective.name": "path", "objective.path": "name"}
    for name, value in sorted(map(parse_override, overrides), key=lambda setting: setting[0] not in others):
        before = _definition(tables)
        _apply_override(tables, (name, value))
        if name in others and _definition(tables, name.partition(".")[2]) != before:
            from megarl.objectives import OPTIONS  # imports torch

            shared = {*ObjectiveTable.model_fields, *OPTIONS} - {others[name]}
            tables["objective"] = {key: value for key, value in tables["objective"].items() if key in shared}


def _definition(tables: dict[str, Any], *keys: str) -> Any:
    """What ``[objective]`` names as the objective, by the first of ``keys`` that it has."""
    table = tables.get("objective", {})
    found = next((table[key] for key in keys or ("path", "name") if key in table), None)
    return absolute(found) if isinstance(found, str) and is_own(found) else found


def parse_override(override: str | Setting) -> Setting:
    """Parse ``section.key=value``; `UserError` if a string has another form."""
    if not isinstance(override, str):
        return override
    try:
        override.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"--set {override!a} is not valid UTF-8") from error
    name, equals, text = override.partition("=")
    *sections, key = name.strip().split(".")
    if not equals or not sections or not key:
        close = _places(key) if equals and not sections else []
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise UserError(f"--set {override!r}: expected section.key=value{hint}")
    try:
        return name.strip(), parse_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        if text in ("True", "False", "None") or text.startswith(('{"', '["')):
            raise UserError(f"--set {name}: {text} is Python or JSON, but values are TOML: {error}") from error
        return name.strip(), text  # a bare word is a string: --set objective.name=grpo
    except ValueError as error:
        raise UserError(f"--set {name}: {error}") from error


def _apply_override(tables: dict[str, Any], setting: Setting) -> None:
    name, value = setting
    *sections, key = name.split(".")
    found: Any = tables
    for section in sections:
        if isinstance(found, list):  # a list of tables with names, as in eval.suites.NAME.samples
            found = next((table for table in found if table.get("name") == section), None)
        else:
            found = found.setdefault(section, {})
        if not isinstance(found, dict | list):
            problem = "no table has this name" if found is None else "this is a key, not a table"
            raise UserError(f"--set {name}: {section!r}: {problem}")
    if isinstance(found, list):
        raise UserError(f"--set {name}: expected {'.'.join(sections)}.NAME.{key}")
    found[key] = value


def explain(error: dict[str, Any], kind: type[BaseModel], name: str) -> str:
    """An error of pydantic as a line. kind: the model; name: what it describes."""
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown {_unknown(error['loc'], kind)}"
    if error["type"] == "missing":
        return f"{where}: required, but not set"
    if error["type"] in ("tuple_type", "list_type"):
        return f"{where}: expected a list, in brackets (got {_short(error['input'])})"
    got = "" if isinstance(error["input"], dict | BaseModel) else f" (got {_short(error['input'])})"
    return f"{where or name}: {error['msg'].removeprefix('Value error, ')}{got}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."


def _places(key: str) -> list[str]:
    """``section.key`` for each table that has this key, or else the key with the nearest name."""
    tables = {name: field.annotation for name, field in Recipe.model_fields.items()}
    named = {name: set(getattr(table, "model_fields", ())) for name, table in tables.items()}
    known = sorted(set().union(*named.values()))
    close = key if key in known else nearest(key, known)
    return [f"{name}.{close}" for name, keys in named.items() if close in keys]


def _unknown(loc: tuple[Any, ...], table: Any) -> str:
    """The end of a message "... unknown": key or table, and what may have been meant. loc: its path in ``table``."""
    of_recipe = table is Recipe
    kind = "key" if len(loc) > 1 or not of_recipe else "table"
    for part in loc[:-1]:
        inside = get_args(table)  # not empty for a list or dict of tables
        table = next(t for t in inside if hasattr(t, "model_fields")) if inside else table.model_fields[part].annotation
        if isinstance(table, UnionType):  # an optional table
            table = next(t for t in get_args(table) if hasattr(t, "model_fields"))
    known = list(table.model_fields)
    places = _places(str(loc[-1])) if of_recipe and len(loc) < 3 else []
    elsewhere = [place for place in places if place.endswith(f".{loc[-1]}")]
    if elsewhere and str(loc[-1]) not in known:
        return f"{kind}; did you mean {' or '.join(elsewhere)}?"
    return f"{kind}; {did_you_mean(str(loc[-1]), known)}"
