"""What a run was begun with beside its recipe: the ``--set``s of its command line, and another run's optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megarl.errors import UserError
from megarl.recipe.tables import Recipe
from megarl.storage.checked_json import read_checked, write_checked
from megarl.storage.checkpoints import checkpoints
from megarl.storage.run_dir import RunDir

SETTINGS, START = "settings.json", "start"
# folders of a branch with another reward, by stage: links to the rollouts as they were scored before, and the new ones
SCORED_BEFORE, RESCORED = "scored_before", "rescored"


def recorded(root: Path) -> list[str]:
    """The ``--set``s that the commands of a run have given so far, each setting once; none for no run."""
    path = root / SETTINGS
    if not path.exists():
        return []
    remedy = "Delete it, and give all --set of the run again"
    return [str(text) for text in read_checked(path, remedy).get("settings", [])]


def record(root: Path, overrides: Iterable[str]) -> None:
    """Remember them, the last of each setting, so that the same command continues without them."""
    last = {text.partition("=")[0].strip(): text for text in (*recorded(root), *overrides)}
    if list(last.values()) != recorded(root):
        write_checked(root / SETTINGS, {"settings": list(last.values())})


def result_of(root: Path) -> tuple[Path, Path]:
    """(policy, checkpoint) with which a finished run ended; `UserError` where one of them is not there."""
    run = RunDir.open(root)
    run.check_links()
    last = run.stage(run.recipe.schedule.stages - 1)
    path = dict(checkpoints(last.checkpoints)).get(run.recipe.schedule.updates_per_stage)
    if not run.final.exists() or path is None:
        what = run.final if not run.final.exists() else f"the last checkpoint of {last.checkpoints}"
        raise UserError(f"--continue-from {root}: {what} is not there, so that run is not finished, or let go of it")
    return run.final, path


def check_weights(before: Recipe, after: Recipe) -> None:
    """`UserError` where --continue-from would take an optimizer of adapters, or give one to adapters."""
    if before.actor.lora is not None or after.actor.lora is not None:
        raise UserError(
            "--continue-from: with [actor.lora], in either run, the optimizer is of adapters, which the result has in "
            'its weights already. [model] path = "RUN/final" begins a run with that result, and an optimizer of its own'
        )


def link_start(run: RunDir, checkpoint: Path) -> None:
    """Begin ``run`` with the optimizer of another one."""
    link = run.root / START
    if not link.is_symlink():
        link.symlink_to(checkpoint)


def start_of(run: RunDir) -> Path | None:
    """The checkpoint that the run begins with, of another one; `UserError` where that was moved."""
    link = run.root / START
    if link.is_symlink() and not link.exists():
        raise UserError(f"{link} is a link to {link.readlink()}, the checkpoint that the run begins with: put it back")
    return link.resolve() if link.exists() else None
