"""Generates docs/recipe.md, every table and key of a recipe, from the fields in ``megarl/recipe`` and their comments.

A comment stands behind its field, or in the lines above it.
"""

from __future__ import annotations

import ast
import re
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from megarl.recipe.names import ENGINES, VERIFIERS
from megarl.recipe.tables import Recipe

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/recipe.md"
ALIASES = {
    "Engine": f"Literal{list(ENGINES)}",
    "VerifierKind": f"Literal{list(VERIFIERS)}",
    "RecomputeSetting": "str | tuple[str, ...]",
    "typing.": "",
    "pathlib.": "",
}
ALIAS = re.compile("|".join(map(re.escape, ALIASES)))
HEAD = """# Every table and key of a recipe

Made by `tools/recipe_page.py` from the fields in [megarl/recipe](../megarl/recipe) and their comments. The objectives'
own keys are in [objectives.md](objectives.md). A key without a default must be set.
"""


def described() -> dict[tuple[str, str], tuple[str, str]]:
    """(class, field) -> its type as the source has it, and its comment."""
    found = {}
    for path in sorted((ROOT / "megarl/recipe").glob("*.py")):
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse(path.read_text())):
            for field in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    first, last = field.lineno - 2, field.end_lineno - 1
                    after = lines[last][field.end_col_offset :].partition("#")[2].strip()
                    above: list[str] = []
                    while lines[first].strip().startswith("#"):
                        above.insert(0, lines[first].strip("# "))
                        first -= 1
                    kind = ast.unparse(field.annotation)
                    found[node.name, field.target.id] = kind, after or " ".join(above)
    return found


def inner(kind: Any) -> type[BaseModel] | None:
    """The table in the type of a field, if it is one, or a list or dict of some."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    return next(filter(None, map(inner, typing.get_args(kind))), None)


def tables(header: str, table: type[BaseModel], known: dict[tuple[str, str], tuple[str, str]]) -> list[str]:
    """The section of a table, and those of the tables in it."""
    own, others = [], []
    for key, field in table.model_fields.items():
        if kind := inner(field.annotation):
            name = f"{header}.{key}".lstrip(".")
            several = typing.get_origin(field.annotation)
            others += tables(
                f"{name}.N" if several is dict else f"[{name}]" if several in (tuple, list) else name, kind, known
            )
            continue
        places = ((owner.__name__, key) for owner in table.__mro__)
        shown, comment = next(known[place] for place in places if place in known)
        shown = ALIAS.sub(lambda alias: ALIASES[alias[0]], shown)
        default = "" if field.is_required() else f"`{field.default}`"
        cells = [f"`{key}`", f"`{shown}`", default, comment]
        own.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    title = f"\n## [{header}]\n" if header else "\n## Tables that are passed through\n"
    return [title, "| key | type | default | what it is |", "|---|---|---|---|", *own, *others] if own else others


def page() -> str:
    return HEAD + "\n".join(tables("", Recipe, described())) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
