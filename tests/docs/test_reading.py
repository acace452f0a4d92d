"""docs/reading.md: everything that it names is there."""

import ast
import re

from tests.helpers import ROOT

PAGE = (ROOT / "docs/reading.md").read_text()
REFERENCE = re.compile(r"`([\w/]+\.py): ([\w.]+)`")


def is_defined(path: str, name: str) -> bool:
    """Whether the source of a module defines ``name``: a function, a class, a method or field of one, or a constant."""
    body: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
    for part in name.split("."):
        if not (found := [node for node in body if part in names_of(node)]):
            return False
        body = getattr(found[0], "body", [])
    return True


def names_of(node: ast.stmt) -> set[str | None]:
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return {getattr(node, "name", None), *(target.id for target in targets if isinstance(target, ast.Name))}


def test_everything_that_the_page_names_is_there():
    references = REFERENCE.findall(PAGE)
    assert len(references) > 40 and not is_defined("megarl/storage/rollouts.py", "RolloutWriter.read")
    assert [f"{path}: {name}" for path, name in references if not is_defined(path, name)] == []
