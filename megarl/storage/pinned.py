"""``prompts.json``: checksums of the prompt files, chat templates and reward functions at the beginning of a run."""

from __future__ import annotations

import os
from pathlib import Path

from megarl.errors import UserError
from megarl.recipe.tables import Recipe
from megarl.storage.checked_json import read_checked, write_checked
from megarl.storage.files import file_sha256


def pin(path: Path, recipe: Recipe) -> None:
    """Write the checksums to ``path``, unless it exists or one of the files is missing."""
    if not path.exists() and all(map(os.path.isfile, _files(recipe))):
        write_checked(path, {"files": _sums(recipe)})


def check_pinned(path: Path, recipe: Recipe) -> None:
    """`UserError` if a file has changed since the run began.

    The split into training and held-out prompts, and so every accuracy, depends on all rows of the prompt files.
    """
    if not path.exists():
        return
    root, remedy = path.parent, "Delete it and start again: the checksums of the present files are then recorded"
    began = read_checked(path, remedy).get("files", {})
    others = dict.fromkeys(recipe.reward_files(), "reward function in")
    others |= dict.fromkeys(recipe.template_files(), "chat template")
    for name, found in _sums(recipe).items():
        if began.get(name, found) != found and name in others:
            raise UserError(
                f"the {others[name]} {name} has changed since {root} began: put the old file back, or use "
                "another --run-dir for the new one"
            )
        if began.get(name, found) != found:
            raise UserError(
                f"the prompt file {name} has changed since {root} began, which would change the held-out prompts: put "
                "the old file back, or use another --run-dir for the new one"
            )


def _files(recipe: Recipe) -> list[str]:
    return [*recipe.prompt_files(), *recipe.template_files(), *recipe.reward_files()]


def _sums(recipe: Recipe) -> dict[str, str]:
    try:
        return {name: file_sha256(Path(name)) for name in _files(recipe)}
    except OSError as error:
        raise UserError(f"cannot read the prompt file {error.filename}: {error.strerror}") from error
