"""Settings that change during a run, from some stage on: which of them may change, and their values in earlier stages.

An "era" is a series of stages with the same recipe. ``recipe_until_002.toml`` in a run directory is the recipe of
stages 0 and 1, and ``recipe.toml`` that of the later ones. Of an earlier recipe only the tables in `_TABLES` are used.
"""

from __future__ import annotations

import re
from pathlib import Path

from megarl.recipe.tables import Recipe
from megarl.storage.run_recipe import dump, load

_TABLES = ("optimizer", "reward", "eval")
EVALUATION = ("every", "every_updates", "best", "samples", "temperature", "top_p", "greedy", "max_response_tokens")
_NAME = re.compile(r"recipe_until_(\d{3,})\.toml")


def from_next_stage(settings: list[str], stage: Path, before: Recipe) -> list[str]:
    """Those of ``settings`` ("section.key: old -> new") that may change from the next stage on.

    stage: the directory of the next stage, the first that is not trained yet.
    The reward may change until the stage has rollouts, and the optimizer until it has a checkpoint. The held-out
    prompts may not change, since training leaves them out. With a token budget a stage also trains groups that earlier
    stages scored, so the reward cannot change at all. Nothing can change in a branch, which has a single stage.
    """
    if any(path.is_symlink() for path in stage.parent.glob("*/rollouts")):
        return []
    has_scored_groups = before.rollout.token_budget is not None and int(stage.name) > 0
    scored = has_scored_groups or (stage / "rollouts").exists()
    trained = any(stage.glob("checkpoints/update_*"))
    allowed = [f"eval.{name}" for name in EVALUATION]
    return [
        line
        for line in settings
        if line.partition(":")[0] in allowed
        or (line.startswith("reward.") and not scored)
        or (line.startswith("optimizer.") and not trained)
    ]


def remember(root: Path, before: Recipe, stage: int) -> tuple[Path, str] | None:
    """(path, text) of the file that keeps ``before`` as the recipe of the stages before ``stage``.

    None if there are no such stages, or if the file exists: after several changes before the same stage, the first file
    is right, because nothing was made with the recipes in between.
    """
    path = root / f"recipe_until_{stage:03d}.toml"
    return (path, dump(before)) if stage and not path.exists() else None


def recipes_by_stage(root: Path, now: Recipe) -> list[tuple[int, Recipe]]:
    """(number of the first stage that no longer uses it, recipe) of each earlier recipe, oldest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in root.glob("recipe_until_*.toml"))
    ends = sorted((int(match[1]), path) for match, path in found if match)
    return [(end, _with_tables(now, load(path))) for end, path in ends]


def _with_tables(now: Recipe, before: Recipe) -> Recipe:
    return now.model_copy(update={name: getattr(before, name) for name in _TABLES})
