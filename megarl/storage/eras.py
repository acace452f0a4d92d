"""Settings that a run changes from a stage on: which may, since when, and what they were before.

``recipe_until_002.toml`` in a run directory is the recipe of stages 0 and 1, and ``recipe.toml`` that of the others.
Only the tables of `_TABLES` are taken of it.
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
    """Those of ``settings`` ("section.key: old -> new") that the next stage may change; ``stage``: its directory.

    None in a branch, which is one stage. A reward may change while there are no rollouts, the optimizer while there is
    no checkpoint. Held-out prompts stay, since training leaves them out. With a token budget a stage also trains groups
    that earlier ones scored, so that one reward lasts for the whole run.
    """
    if any(path.is_symlink() for path in stage.parent.glob("*/rollouts")):
        return []
    scored_before = before.rollout.token_budget is not None and int(stage.name) > 0
    begun, trained = scored_before or (stage / "rollouts").exists(), any(stage.glob("checkpoints/update_*"))
    allowed = [f"eval.{name}" for name in EVALUATION]
    return [
        line
        for line in settings
        if line.partition(":")[0] in allowed
        or (line.startswith("reward.") and not begun)
        or (line.startswith("optimizer.") and not trained)
    ]


def remember(root: Path, before: Recipe, stage: int) -> tuple[Path, str] | None:
    """File and text that keep ``before`` as the recipe of the stages before ``stage``; None: there is nothing to keep.

    Of several changes before one stage the first counts: nothing was made under the others.
    """
    path = root / f"recipe_until_{stage:03d}.toml"
    return (path, dump(before)) if stage and not path.exists() else None


def eras(root: Path, now: Recipe) -> list[tuple[int, Recipe]]:
    """(the first stage after it, recipe) of each earlier recipe, oldest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in root.glob("recipe_until_*.toml"))
    ends = sorted((int(match[1]), path) for match, path in found if match)
    return [(end, _with_tables(now, load(path))) for end, path in ends]


def _with_tables(now: Recipe, before: Recipe) -> Recipe:
    return now.model_copy(update={name: getattr(before, name) for name in _TABLES})
