"""The files that say how a run was started: its recipes, its ``--set`` options, and the checksums of its prompt files.

An "era" is a series of stages with the same recipe. ``recipe_until_002.toml`` in a run directory is the recipe of
stages 0 and 1, and ``recipe.toml`` that of the later ones. Of an earlier recipe only the tables in `_TABLES` are used.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterable
from pathlib import Path

from megarl.errors import UserError
from megarl.recipe.load import dump_recipe, load_recipe
from megarl.recipe.tables import Recipe
from megarl.storage.checked_json import read_checked, write_checked
from megarl.storage.files import file_sha256, write_atomic

_CHECKSUM = "# checksum of the lines above: "
_TABLES = ("optimizer", "reward", "eval")
EVALUATION = ("every", "every_updates", "best", "samples", "temperature", "top_p", "greedy", "max_response_tokens")
_NAME = re.compile(r"recipe_until_(\d{3,})\.toml")


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


def write_earlier_recipe(root: Path, before: Recipe, stage: int) -> None:
    """Store ``before`` as the recipe of the stages before ``stage``, if there are any, unless one is stored already.

    After several changes before the same stage the first file is right, because nothing was made with the recipes in
    between.
    """
    path = root / f"recipe_until_{stage:03d}.toml"
    if stage and not path.exists():
        write_atomic(path, dump(before))


def recipes_by_stage(root: Path, now: Recipe) -> list[tuple[int, Recipe]]:
    """(number of the first stage that no longer uses it, recipe) of each earlier recipe, oldest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in root.glob("recipe_until_*.toml"))
    ends = sorted((int(match[1]), path) for match, path in found if match)
    return [(end, _with_tables(now, load(path))) for end, path in ends]


def _with_tables(now: Recipe, before: Recipe) -> Recipe:
    return now.model_copy(update={name: getattr(before, name) for name in _TABLES})


def record_prompt_files(path: Path, recipe: Recipe) -> None:
    """Write the checksums to ``path``, unless it exists or one of the files is missing."""
    if not path.exists() and all(map(os.path.isfile, _files(recipe))):
        write_checked(path, {"files": _sums(recipe)})


def check_prompt_files(path: Path, recipe: Recipe) -> None:
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


def recorded_overrides(root: Path) -> list[str]:
    """The ``--set`` options given so far by the commands of a run, each setting once; none if there is no run yet."""
    path = root / "settings.json"
    if not path.exists():
        return []
    remedy = "Delete it, and repeat all --set options of the run"
    return [str(text) for text in read_checked(path, remedy).get("settings", [])]


def record_overrides(root: Path, overrides: Iterable[str]) -> None:
    """Remember ``overrides``, the last value of each setting, so that the command need not repeat them to continue."""
    last = {text.partition("=")[0].strip(): text for text in (*recorded_overrides(root), *overrides)}
    if list(last.values()) != recorded_overrides(root):
        write_checked(root / "settings.json", {"settings": list(last.values())})


def check_continues(before: Recipe, after: Recipe) -> None:
    """`UserError` if one of the runs trains adapters: optimizer states cannot then be continued."""
    if before.actor.lora is not None or after.actor.lora is not None:
        raise UserError(
            "--continue-from does not work with [actor.lora] in either run: the optimizer is of adapters, which are "
            'merged into the result. Set [model] path = "RUN/final" to begin with that result and a new optimizer state'
        )
