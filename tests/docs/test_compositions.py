"""docs/compositions.md is what the check before a start says."""

from __future__ import annotations

import runpy

from tests.helpers import ROOT


def test_the_page_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "tools/compositions_page.py"))["page"]()
    assert page == (ROOT / "docs/compositions.md").read_text(), "run tools/compositions_page.py"
