"""The list of thresholds has every constant of megarl's actor and kernels by which a size may decide."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.rehearsal.branches import NOT_THRESHOLDS, ROOT, THRESHOLDS

PLACES = ("actor", "kernels", "models/delta_net.py")


def numbers(path: Path) -> list[str]:
    found = []
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        name, inside = node.targets[0].id, list(ast.walk(node.value))
        plain = isinstance(node.value, (ast.Constant, ast.BinOp, ast.Call))
        integers = [x.value for x in inside if isinstance(x, ast.Constant) and type(x.value) is int]
        if plain and name.isupper() and any(value > 1 for value in integers):
            found.append(name)
    return found


def test_every_constant_of_a_size_is_listed() -> None:
    package = ROOT / "megarl"
    files = [file for place in PLACES for file in (sorted((package / place).rglob("*.py")) or [package / place])]
    constants = {
        f"{'.'.join(file.relative_to(package).with_suffix('').parts)}.{name}"
        for file in files
        for name in numbers(file)
    }
    assert constants == THRESHOLDS.keys() | NOT_THRESHOLDS.keys()
