"""Finding and loading the compiled kernels: the errors where they are missing or outdated."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megarl.errors import UserError
from megarl.kernels import library


def test_error_for_a_missing_library_names_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert library.find_library("cpu") is None
    with pytest.raises(UserError, match=r"compiled cpu kernels are not installed; .*: pip install \."):
        library.load_library.__wrapped__("cpu")


def test_outdated_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    current = library.ABI_VERSION
    monkeypatch.setattr(library, "ABI_VERSION", current + 1)
    with pytest.raises(UserError, match=f"has ABI version {current}, but megarl needs {current + 1}"):
        library.load_library.__wrapped__("cpu")
