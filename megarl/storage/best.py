"""``best/``, the evaluated policy with the highest accuracy, and the removal of policies that are no longer needed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megarl.storage.files import atomic_directory
from megarl.storage.policies import read_info
from megarl.storage.retention import remove_policies
from megarl.storage.run_dir import RunDir, Stage


def update_best_and_remove_policies(stage: Stage) -> None:
    """Update ``best``, then remove policies that are no longer needed; called when ``stage`` begins and is evaluated.

    Removed are policies exported between two stages, and stages' own policies as `megarl.storage.retention` decides.
    It can be repeated after a kill, since policies are removed only after ``best`` is complete.
    """
    run = stage.run
    keep_best(run)
    # older versions were removed already by the call at the beginning of the stage before
    oldest = run.stage(max(stage.number - 1, 0)).oldest_needed // run.recipe.schedule.updates_per_stage
    for version in run.versions(run.stage(number) for number in range(oldest, stage.number)):
        if version < stage.oldest_needed and not run.lacks_evaluation(version):
            run.remove_version(version)
    remove_policies(stage)


def best_version(run: RunDir) -> int | None:
    """The version (number of updates) of the best policy; None if nothing was evaluated.

    It has the highest avg@k on the first suite, or with ``eval.best = "mean"`` the highest mean over all suites, each
    with the same weight. Ties go to the earliest version. If ``eval.best`` changed during the run, its newest value
    applies to all stages.
    """
    scores = _scores(run)
    return max(scores, key=scores.__getitem__, default=None)


def _scores(run: RunDir) -> dict[int, float]:
    """{version: score that `best_version` compares}, earliest first, of every policy with all needed evaluations."""
    recipe = run.newest.recipe
    names = [suite.name for suite in recipe.suites][: 1 if recipe.eval.best == "first" else None]
    found = {key: event["accuracy"] for key, event in run.evaluations().items()}
    complete = sorted({version for version, _ in found if names and all((version, name) in found for name in names)})
    return {version: sum(found[version, name] for name in names) for version in complete}


def keep_best(run: RunDir) -> None:
    """Make ``best`` the policy that `best_version` names, if that policy still exists.

    ``best`` may hold the only copy of its policy, so it is replaced only by a policy with a higher score.
    """
    # its name must not match the temporary directories that `atomic_directory(run.best)` removes
    old = run.best.with_name(".best_old.tmp")
    if run.best.exists():
        shutil.rmtree(old, ignore_errors=True)
    elif old.exists() and not os.path.lexists(run.best):
        old.rename(run.best)  # a killed attempt had moved it away
    version = best_version(run)
    if version is None or not (policy := run.version(version)).exists():
        return
    if run.best.is_symlink():  # made by a person, and its target may be a policy that will be removed
        run.best.unlink()
    if run.best.exists():
        if not _is_better(run, read_info(run.best).version, version):
            return
        run.best.rename(old)
    with atomic_directory(run.best) as temporary:
        for file in sorted(policy.iterdir()):
            if file.is_file():
                _link(file.resolve(), temporary / file.name)
    shutil.rmtree(old, ignore_errors=True)


def _is_better(run: RunDir, held: int, candidate: int) -> bool:
    """Whether version ``candidate``, which has the highest score, should replace version ``held`` in ``best``."""
    scores = _scores(run)
    if held in scores:
        return scores[held] < scores[candidate]
    return run.version(held).exists()  # its evaluations are lost, so ``held`` goes only if there is another copy


def _link(file: Path, target: Path) -> None:
    """Hard-link a file, which is never written again; copy it if the file system has no hard links."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)
