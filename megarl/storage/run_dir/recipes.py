"""The files that say how a run was started: its recipes, and the checksums of its prompt files.

An "era" is a series of stages with the same recipe. ``recipe_until_002.toml`` in a run directory is the recipe of
stages 0 and 1, and ``recipe.toml`` that of the later ones. Of an earlier recipe only the tables in `_TABLES` are used.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Container
from pathlib import Path

from megarl.errors import UserError
from megarl.foreign import quoted
from megarl.recipe.layout import BATCHES, TRAINING_TABLES
from megarl.recipe.load import dump_recipe, load_recipe
from megarl.recipe.tables import Recipe
from megarl.storage.checked_json import read_checked, write_checked
from megarl.storage.files import file_sha256, write_atomic

_REMEDY = "Delete it and start again: the checksums of the present files are then recorded"
_TABLES = ("objective", "optimizer", "reward", "eval")
EVALUATION = ("every", "every_updates", "best", "samples", "temperature", "top_p", "greedy", "max_response_tokens")
# of [rollout]: the engine and the options that are passed through to it
ENGINE = ("engine:", "vllm.", "sglang.")
_NAME = re.compile(r"recipe_until_(\d{3,})\.toml")


def dump(recipe: Recipe) -> str:
    """The text of `dump_recipe`, with its checksum in a comment at the end."""
    return _with_checksum(dump_recipe(recipe))


def _with_checksum(text: str) -> str:
    return f"{text}\n# checksum of the lines above: {zlib.crc32(text.encode()):08x}\n"


def load(path: Path) -> Recipe:
    """Load what `dump` wrote; `UserError` if the file was changed since."""
    try:
        recipe = load_recipe(path)
    except UserError as error:
        remedy = "restore it from a copy"
        if ": unknown key" in str(error):  # in an earlier version it was known
            remedy = "to continue the run without an unknown key, delete its line and the last one, a checksum"
        raise UserError(f"{path}, the recipe of the run, cannot be used; {remedy}. {error}") from error
    data = path.read_bytes()
    text = data[:-1].rpartition(b"\n")[0].decode(errors="replace")
    if data != _with_checksum(text).encode() and data.rstrip().rpartition(b"\n")[2].lstrip().startswith(b"#"):
        raise UserError(
            f"{path} was changed after the run began: restore it from a copy, or delete its last line, which is a "
            "checksum, if the change was meant"
        )
    return recipe


def from_next_stage(settings: list[str], stage: Path, before: Recipe) -> list[str]:
    """Those of ``settings`` ("section.key: old -> new") that may change from the next stage on.

    stage: the directory of the next stage, the first that is not trained yet.
    Reward and engine may change until the stage has rollouts, objective and optimizer until it has a checkpoint, and
    ``[stages.N]`` until stage N has rollouts. The held-out prompts may not change, since training leaves them out. With
    a token budget a stage also trains groups that earlier stages scored, so the reward cannot change at all. Nothing
    can change in a branch, which has a single stage.
    """
    if any(path.is_symlink() for path in stage.parent.glob("*/rollouts")):
        return []
    number, empty = int(stage.name), not (stage / "rollouts").exists()
    allowed = [f"eval.{name}:" for name in EVALUATION]
    if empty:
        allowed += [f"rollout.{name}" for name in ENGINE]
        allowed += [] if before.leaves_groups and number else ["reward."]
    if not any(stage.glob("checkpoints/update_*")):
        allowed += ["objective.", "optimizer."]
    first = number if empty else number + 1  # stage whose table [stages.N] may change
    return [
        line
        for line in settings
        if line.startswith(tuple(allowed)) or (line.startswith("stages.") and int(line.split(".")[1]) >= first)
    ]


def refuse_changes(root: Path, settings: list[str], before: Recipe) -> None:
    """`UserError` if there are ``settings``, which cannot change in the run ``root``, with the ways to use them."""
    if not settings:
        return
    trains = all(line.startswith((*TRAINING_TABLES, "reward.", *BATCHES)) for line in settings)
    branch = f"`megarl optimize {quoted(root)} --stage N --output NEW --set KEY=VALUE`"
    raise UserError(
        f"{root} belongs to a run with another recipe (old -> new):\n  "
        + "\n  ".join(settings)
        + "\nuse the old settings, those of its recipe.toml, to continue this run, or another --run-dir; "
        + f"for the new ones on the same rollouts: {branch}; " * (trains and before.schedule.one_policy)
        + "for the new ones from the result of this run: "
        f"`megarl train RECIPE --run-dir NEW --continue-from {quoted(root)}`"
    )


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
    engine = {name: getattr(before.rollout, name) for key in ENGINE for name in [key[:-1]]}
    rollout = now.rollout.model_copy(update=engine)  # the number of its replicas and their GPUs are the present ones
    return now.model_copy(update={name: getattr(before, name) for name in _TABLES} | {"rollout": rollout})


def record_files(path: Path, recipe: Recipe, unused: Container[str]) -> list[str]:
    """Write the checksums of the files that the recipe names to ``path``, unless one is missing; those of files that it
    has already stay. Returns the files that have changed.

    unused: tables ("reward", "objective") whose own Python files may change, because nothing was made with them.
    """
    try:
        now = _sums(recipe)
    except UserError:
        return []
    began = read_checked(path, _REMEDY)["files"] if path.exists() else {}
    may_change = {file for file, setting in recipe.own_files().items() if setting.partition(".")[0] in unused}
    kept = {name: crc for name, crc in began.items() if name not in may_change}
    if now | kept != began:
        write_checked(path, {"files": now | kept})
    return sorted(name for name in may_change if began.get(name, now[name]) != now[name])


def check_files(path: Path, recipe: Recipe) -> None:
    """`UserError` if a file has changed since the run began.

    The split into training and held-out prompts, and so every accuracy, depends on all rows of the prompt files.
    """
    if not path.exists():
        return
    began = read_checked(path, _REMEDY).get("files", {})
    for name, found in _sums(recipe).items():
        if began.get(name, found) == found:
            continue
        kind, remedy = "prompt file", "use another --run-dir for the new one"
        if name in recipe.template_files():
            kind = "chat template"
        if setting := recipe.own_files().get(name):
            kind = f"{setting.partition('.')[0]} file"
            branch = f"megarl optimize {quoted(path.parent)} --stage 0 --output NEW --set {setting}=NEW"
            remedy = f"give the new one another name and branch: {branch}"
        raise UserError(f"the {kind} {name} has changed since {path.parent} began: put the old file back, or {remedy}")


def _sums(recipe: Recipe) -> dict[str, str]:
    names = [*recipe.prompt_files(), *recipe.template_files(), *recipe.own_files()]
    try:
        return {name: file_sha256(Path(name)) for name in names}
    except OSError as error:
        raise UserError(f"cannot read the file {error.filename}: {error.strerror}") from error


def check_continues(before: Recipe, after: Recipe) -> None:
    """`UserError` if one of the runs trains adapters: optimizer states cannot then be continued."""
    if before.actor.lora is not None or after.actor.lora is not None:
        raise UserError(
            "--continue-from does not work with [actor.lora] in either run: the optimizer is of adapters, which are "
            'merged into the result. Set [model] path = "RUN/final" to begin with that result and a new optimizer state'
        )
