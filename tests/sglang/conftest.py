"""The real SGLang server on the CPU; skipped where `make sglang` has not been run, unless MEGARL_REQUIRE_SGLANG=1."""

import os
from pathlib import Path

import pytest

from megarl.rollout.sglang.server import installed_version

PYTHON = Path(__file__).parent / "python"
REQUIRED = os.environ.get("MEGARL_REQUIRE_SGLANG") == "1"


def pytest_collection_modifyitems(items):
    mine = [item for item in items if Path(__file__).parent in item.path.parents]
    missing = bool(mine) and installed_version(PYTHON) is None
    for item in mine:
        item.add_marker(pytest.mark.sglang)
        if missing and not REQUIRED:
            item.add_marker(pytest.mark.skip(reason="no SGLang in .venv-sglang: make sglang"))
