"""Imports benchmarks as modules: they are scripts that import each other by name from their own folder."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from tests.helpers import ROOT


def load_benchmark(name: str) -> ModuleType:
    """The module ``benchmarks/<name>.py``."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)
