"""``megarl init``: a recipe to begin with, or an objective, from those that megarl is shipped with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from megarl.errors import UserError, did_you_mean
from megarl.foreign import quoted
from megarl.recipe.load import shipped
from megarl.storage.files import write_atomic

OWN = "own_objective"


def init(name: str, folder: Path) -> str:
    """Copy the shipped recipe ``name`` into ``folder``; returns the lines to print, with the names of all of them.

    name: of a recipe, or "own_objective".
    `UserError` if there is no such recipe, or the file exists."""
    examples = shipped("examples")
    if name == OWN:
        return _own_objective(examples / OWN, folder)
    recipes = {str(path.relative_to(examples).with_suffix("")): path for path in sorted(examples.rglob("*.toml"))}
    if name not in recipes:
        raise UserError(f"there is no recipe {name!r}; {did_you_mean(name, [OWN, *recipes])}")
    target = folder / f"{name.replace('/', '-')}.toml"
    beside = recipes[name].parent
    text = re.sub(rf"examples/({beside.name}/\w+\.py)", rf"{examples}/\1", recipes[name].read_text())
    _write({target: text})
    made = re.findall(r'"(.+)"  # made by (\w+\.py)', text)
    steps = [f"python {quoted(beside / script)}" for _, script in made]
    steps += [f"megarl data show {quoted(target)}"]
    if tomllib.loads(text).get("actor", {}).get("backend") != "cpu":
        steps += [f"megarl plan {quoted(target)} --gpu h200"]
    steps += [f"megarl train {quoted(target)} --run-dir runs/a"]
    return "\n".join(
        [
            f"wrote   {target}{'' if made else ': set [model] path and [data] in it'}",
            f"beside  {beside}  # the config.json of its model for a plan, and scripts that it names",
            f"others  {', '.join(other for other in [*recipes, OWN] if other != name)}",
            f"docs    {shipped('docs')}",
            "next    " + "\n        ".join(steps),
        ]
    )


def _own_objective(beside: Path, folder: Path) -> str:
    """Copy the objective that is there to be changed, and its test; returns the lines to print."""
    _write(texts := {folder / path.name: path.read_text() for path in sorted(beside.glob("*.py"))})
    return "\n".join(
        [
            *(f"wrote   {path}" for path in texts),
            "test    python test_own_objective.py",
            "use     megarl train RECIPE.toml --run-dir DIR --set objective.path=own_objective.py:OwnObjective",
        ]
    )


def _write(texts: dict[Path, str]) -> None:
    if there := [path for path in texts if path.exists()]:
        raise UserError(f"{there[0]} exists already")
    for path, text in texts.items():
        write_atomic(path, text)
