"""Adds stages to a finished run: its result becomes the policy of the first additional stage."""

from __future__ import annotations

import shutil
from pathlib import Path

from megarl.recipe.tables import Recipe
from megarl.storage.files import make_directory


def adds_stages(before: Recipe, after: Recipe) -> bool:
    """Whether both recipes are of staged runs, and ``after`` has more stages than ``before``."""
    kinds = {before.schedule.kind, after.schedule.kind}
    return kinds == {"staged"} and after.schedule.stages > before.schedule.stages


def free_result(final: Path, policy: Path) -> None:
    """Move ``final``, if it exists, to ``policy``, the policy of the first additional stage.

    To be called before the new recipe is written: after a kill in between, the old recipe makes the last stage export
    its result to ``final`` again, and the next call replaces ``policy``.
    """
    if final.exists():
        make_directory(policy.parent)
        shutil.rmtree(policy, ignore_errors=True)
        final.rename(policy)
