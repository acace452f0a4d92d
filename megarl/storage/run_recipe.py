"""The recipe file of a run directory: TOML with a checksum."""

from __future__ import annotations

import zlib
from pathlib import Path

from megarl.errors import UserError
from megarl.recipe.load import dump_recipe, load_recipe
from megarl.recipe.tables import Recipe

_CHECKSUM = "# checksum of the lines above: "


def dump(recipe: Recipe) -> str:
    """The text of `dump_recipe`, with its checksum in a comment at the end."""
    text = dump_recipe(recipe)
    return f"{text}\n{_CHECKSUM}{zlib.crc32(text.encode()):08x}\n"


def load(path: Path) -> Recipe:
    """Load what `dump` wrote; `UserError` if the file was changed since."""
    try:
        recipe = load_recipe(path)
    except UserError as error:
        raise UserError(f"{path}, the recipe of the run, cannot be used; restore it from a copy. {error}") from error
    text, mark, checksum = path.read_text().rpartition("\n" + _CHECKSUM)
    if mark and checksum.strip() != f"{zlib.crc32(text.encode()):08x}":
        raise UserError(
            f"{path} was changed after the run began: restore it from a copy, or delete its last line, which is a "
            "checksum, if the change was meant"
        )
    return recipe
