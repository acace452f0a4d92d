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

    Each suite counts the same, whatever its size. Of equal policies the earliest, trained least.
    """
    names = [suite.name for suite in run.recipe.suites][: 1 if run.recipe.eval.best == "first" else None]
    scores = {key: event["accuracy"] for key, event in run.evaluations().items()}
    whole = sorted({version for version, _ in scores if names and all((version, name) in scores for name in names)})
    return max(whole, key=lambda version: sum(scores[version, name] for name in names), default=None)


def keep_best(run: RunDir) -> None:
    """Make ``best`` the policy that `best_version` names, while that policy is there."""
    version = best_version(run)
    if version is None or not (policy := run.version(version)).exists():
        return
    if run.best.exists():
        if read_info(run.best).version == version:
            return
        old = run.best.with_name(".best.old.tmp")
        shutil.rmtree(old, ignore_errors=True)
        run.best.rename(old)
    with atomic_directory(run.best) as temporary:
        for file in sorted(policy.iterdir()):
            if file.is_file():
                _link(file.resolve(), temporary / file.name)
    shutil.rmtree(run.best.with_name(".best.old.tmp"), ignore_errors=True)


def _link(file: Path, target: Path) -> None:
    """A second name for a file that is never written again; a copy where the file system has no links."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)
