"""A finished run that is to have more stages: its result becomes the policy that begins the next one."""

from __future__ import annotations

import shutil
from pathlib import Path

from megarl.recipe.tables import Recipe
from megarl.storage.files import make_directory


def adds_stages(before: Recipe, after: Recipe) -> bool:
    """Whether a run with recipe ``before`` may continue with the stages of ``after``: more of them, of a staged run."""
    kinds = {before.schedule.kind, after.schedule.kind}
    return kinds == {"staged"} and after.schedule.stages > before.schedule.stages


def free_result(final: Path, policy: Path) -> None:
    """Make ``final``, where it is, the ``policy`` of the stage that follows.

    Before the new recipe is written: after a kill in between the last stage exports its result again, and what lies at
    ``policy`` is removed by the next attempt.
    """
    if final.exists():
        make_directory(policy.parent)
        shutil.rmtree(policy, ignore_errors=True)
        final.rename(policy)
