"""Pages that a tool makes are up to date: docs/compositions.md, and docs/recipe.md, which has every key."""

from __future__ import annotations

import runpy

import pytest

from tests.helpers import ROOT


@pytest.mark.parametrize("name", ["recipe", "compositions"])
def test_the_page_is_up_to_date(name: str) -> None:
    tool = f"tools/{name}_page.py"
    assert runpy.run_path(str(ROOT / tool))["page"]() == (ROOT / f"docs/{name}.md").read_text(), f"run {tool}"
