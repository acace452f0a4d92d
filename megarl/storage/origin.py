"""The origin of a run beside its recipe: ``--set`` options, and the checkpoint of another run that it continues."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megarl.errors import UserError
from megarl.recipe.tables import Recipe
from megarl.storage.checked_json import read_checked, write_checked
from megarl.storage.checkpoints import checkpoints
from megarl.storage.run_dir import RunDir

SETTINGS, START = "settings.json", "start"
# directories of a branch with another reward, with one entry per stage
SCORED_BEFORE = "scored_before"  # links to the rollouts with their old rewards
RESCORED = "rescored"  # the same rollouts with the new rewards


def recorded(root: Path) -> list[str]:
    """The ``--set`` options given so far by the commands of a run, each setting once; none if there is no run yet."""
    path = root / SETTINGS
    if not path.exists():
        return []
    remedy = "Delete it, and repeat all --set options of the run"
    return [str(text) for text in read_checked(path, remedy).get("settings", [])]


def record(root: Path, overrides: Iterable[str]) -> None:
    """Remember ``overrides``, the last value of each setting, so that the command need not repeat them to continue."""
    last = {text.partition("=")[0].strip(): text for text in (*recorded(root), *overrides)}
    if list(last.values()) != recorded(root):
        write_checked(root / SETTINGS, {"settings": list(last.values())})


def result_of(root: Path) -> tuple[Path, Path]:
    """(policy, checkpoint) with which a finished run ended; `UserError` if one of them does not exist."""
    run = RunDir.open(root)
    run.check_links()
    last = run.stage(run.recipe.schedule.stages - 1)
    path = dict(checkpoints(last.checkpoints)).get(run.recipe.schedule.updates_per_stage)
    if not run.final.exists() or path is None:
        what = run.final if not run.final.exists() else f"the last checkpoint in {last.checkpoints}"
        raise UserError(
            f"--continue-from {root}: {what} does not exist: that run is not finished, or keep_stages removed it"
        )
    return run.final, path


def check_weights(before: Recipe, after: Recipe) -> None:
    """`UserError` if one of the runs trains adapters: optimizer states cannot then be continued."""
    if before.actor.lora is not None or after.actor.lora is not None:
        raise UserError(
            "--continue-from does not work with [actor.lora] in either run: the optimizer is of adapters, which are "
            'merged into the result. Set [model] path = "RUN/final" to begin with that result and a new optimizer state'
        )


def link_start(run: RunDir, checkpoint: Path) -> None:
    """Make ``run`` start from the optimizer state in another run's ``checkpoint``."""
    link = run.root / START
    if not link.is_symlink():
        link.symlink_to(checkpoint)


def start_of(run: RunDir) -> Path | None:
    """The checkpoint of another run from which this run starts, if any; `UserError` if it was moved."""
    link = run.root / START
    if link.is_symlink() and not link.exists():
        raise UserError(f"{link} is a link to {link.readlink()}, the checkpoint from which the run starts: put it back")
    return link.resolve() if link.exists() else None
