"""New directories that are either written completely or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from megarl.errors import UserError
from megarl.storage.files import atomic_directory, make_directory


def check_new(path: Path) -> None:
    """`UserError` if ``path`` exists."""
    if path.exists() or path.is_symlink():
        raise UserError(f"{path} exists already: choose a path that does not exist")


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Like `atomic_directory`, but `check_new` comes first, and an error removes the temporary directory at once.

    The next attempt may write to another path, and would then not remove it.
    """
    check_new(path)
    make_directory(path.parent)
    with atomic_directory(path) as temporary:
        try:
            yield temporary
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
