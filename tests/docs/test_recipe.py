"""Pages that a tool makes are up to date: docs/compositions.md, and docs/recipe.md, which has every key."""

from __future__ import annotations

import runpy

import pytest

from megarl.recipe.data_table import SourceTable
from megarl.recipe.tables import ActorTable, Recipe
from tests.helpers import ROOT


@pytest.mark.parametrize("name", ["recipe", "compositions"])
def test_the_page_is_up_to_date(name: str) -> None:
    tool = f"tools/{name}_page.py"
    assert runpy.run_path(str(ROOT / tool))["page"]() == (ROOT / f"docs/{name}.md").read_text(), f"run {tool}"


def test_every_table_and_key_is_there() -> None:
    page = (ROOT / "docs/recipe.md").read_text()
    assert [name for name in Recipe.model_fields if f"[{name}" not in page and f"| `{name}` |" not in page] == []
    keys = [*ActorTable.model_fields, *SourceTable.model_fields]
    assert [key for key in keys if f"`{key}` |" not in page] == ["lora"]
