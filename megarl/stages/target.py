"""Where something is written that must be there whole or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from megarl.errors import UserError
from megarl.storage.files import atomic_directory, make_directory


def check_new(path: Path) -> None:
    """`UserError` where ``path`` exists."""
    if path.exists() or path.is_symlink():
        raise UserError(f"{path} exists already: name one that does not")


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """As `atomic_directory`, but after an error nothing is left: no other attempt need have the same name."""
    check_new(path)
    make_directory(path.parent)
    with atomic_directory(path) as temporary:
        try:
            yield temporary
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
