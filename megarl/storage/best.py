"""``best/``: the evaluated policy with the highest accuracy; what else was exported for evaluations is removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megarl.storage.files import atomic_directory
from megarl.storage.policies import read_info
from megarl.storage.retention import remove_policies
from megarl.storage.run_dir import RunDir, Stage


def settle_evaluations(stage: Stage) -> None:
    """After the evaluations that are due when ``stage`` begins: keep the best policy, let go of those between stages
    and of the stages' own that `megarl.storage.retention` need not keep.

    To be repeated after a kill: a policy is removed only when ``best`` is there.
    """
    run = stage.run
    keep_best(run)
    # when the stage before this one began, those that it did not need were removed
    oldest = run.stage(max(stage.number - 1, 0)).oldest_needed // run.recipe.schedule.updates_per_stage
    for version in run.versions(run.stage(number) for number in range(oldest, stage.number)):
        if version < stage.oldest_needed and not run.lacks_evaluation(version):
            run.remove_version(version)
    remove_policies(stage)


def best_version(run: RunDir) -> int | None:
    """Updates of the policy with the highest avg@k on the first suite, or with ``eval.best = "mean"`` over all of them.

    Each suite counts the same, whatever its size. Of equal policies the earliest, trained least. Where ``eval.best``
    has changed on the way, its newest value counts for all stages.
    """
    scores = _scores(run)
    return max(scores, key=scores.__getitem__, default=None)


def _scores(run: RunDir) -> dict[int, float]:
    """By updates, earliest first: what `best_version` compares, of each policy with all the evaluations for it."""
    recipe = run.newest.recipe
    names = [suite.name for suite in recipe.suites][: 1 if recipe.eval.best == "first" else None]
    found = {key: event["accuracy"] for key, event in run.evaluations().items()}
    whole = sorted({version for version, _ in found if names and all((version, name) in found for name in names)})
    return {version: sum(found[version, name] for name in names) for version in whole}


def keep_best(run: RunDir) -> None:
    """Make ``best`` the policy that `best_version` names, while that policy is there.

    What ``best`` holds may have no other copy: it gives way only to a higher score.
    """
    # a name that `atomic_directory(run.best)` does not clear
    old = run.best.with_name(".best_old.tmp")
    if run.best.exists():
        shutil.rmtree(old, ignore_errors=True)
    elif old.exists() and not os.path.lexists(run.best):
        old.rename(run.best)  # of a killed attempt
    version = best_version(run)
    if version is None or not (policy := run.version(version)).exists():
        return
    if run.best.is_symlink():  # somebody's, perhaps to a policy that is to be removed
        run.best.unlink()
    if run.best.exists():
        if not _gives_way(run, read_info(run.best).version, version):
            return
        run.best.rename(old)
    with atomic_directory(run.best) as temporary:
        for file in sorted(policy.iterdir()):
            if file.is_file():
                _link(file.resolve(), temporary / file.name)
    shutil.rmtree(old, ignore_errors=True)


def _gives_way(run: RunDir, held: int, better: int) -> bool:
    """Whether ``best`` with version ``held`` is to become version ``better``, which has the highest score."""
    scores = _scores(run)
    if held in scores:
        return scores[held] < scores[better]
    return run.version(held).exists()  # its evaluations are lost: nothing says that it is worse


def _link(file: Path, target: Path) -> None:
    """A second name for a file that is never written again; a copy where the file system has no links."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)
