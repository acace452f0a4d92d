"""docs/recipe.md is what its tool makes of the tables, and has every key of them."""

from __future__ import annotations

import runpy

from megarl.recipe.data_table import SourceTable
from megarl.recipe.tables import ActorTable, Recipe
from tests.helpers import ROOT

PAGE = (ROOT / "docs/recipe.md").read_text()


def test_the_page_is_up_to_date() -> None:
    assert runpy.run_path(str(ROOT / "tools/recipe_page.py"))["page"]() == PAGE, "run tools/recipe_page.py"


def test_every_table_and_key_is_there() -> None:
    assert [name for name in Recipe.model_fields if f"[{name}" not in PAGE and f"| `{name}` |" not in PAGE] == []
    assert [key for key in (*ActorTable.model_fields, *SourceTable.model_fields) if f"`{key}` |" not in PAGE] == [
        "lora"
    ]
    assert "| `token_budget` | `int \\| None` | `None` | staged runs: the most tokens that a response gets" in PAGE
