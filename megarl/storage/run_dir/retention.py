"""Which policies a run keeps: ``best/``, the evaluated one with the highest accuracy, and ``actor.keep_policies``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megarl.data.tokenizer import files_of
from megarl.errors import UserError
from megarl.foreign import quoted
from megarl.storage.files import atomic_directory, leftover_name, remove_directory
from megarl.storage.policies import read_info
from megarl.storage.run_dir import RunDir, Stage


def update_best_and_remove_policies(stage: Stage) -> None:
    """Update ``best``, then remove policies that are no longer needed; called when ``stage`` begins and is evaluated.

    Removed are policies exported between two stages, and stages' own policies as ``actor.keep_policies`` says.
    It can be repeated after a kill, since policies are removed only after ``best`` is complete.
    """
    run = stage.run
    keep_best(run)
    remove_versions_before(run, stage.oldest_needed)
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
    version = best_version(run)
    if version is None or not (policy := run.version(version)).exists():
        return
    if run.best.exists():
        scores, held = _scores(run), read_info(run.best).version
        # if its evaluations are lost, it goes only if there is another copy
        better = scores[held] < scores[version] if held in scores else run.version(held).exists()
        if not better:
            return
        remove_directory(run.best)  # after a kill the next call makes it, since the better policy is still there
    with atomic_directory(run.best) as temporary:
        for name in files_of(policy):
            (temporary / name).parent.mkdir(exist_ok=True)
            file = (policy / name).resolve()  # which is never written again
            try:
                os.link(file, temporary / name)
            except OSError:  # such as a file system without hard links
                shutil.copyfile(file, temporary / name)


def remove_versions_before(run: RunDir, oldest: int) -> None:
    """Remove those of `RunDir.versions` that are older than ``oldest``, except those that wait for an evaluation."""
    for version in run.versions():
        if version < oldest and not run.lacks_evaluation(version):
            remove_directory(run.version(version))


def remove_versions_after(run: RunDir, saved: int) -> list[int]:
    """Remove the versions from ``saved`` on, where ``saved`` is the update of the checkpoint to resume from.

    They are exported again, and may differ on another layout. Returns the versions that stay.
    """
    for leftover in run.root.glob("stages/*/policies/.*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    versions = run.versions()
    for version in (v for v in versions if v >= saved):
        remove_directory(run.version(version))
    return [v for v in versions if v < saved]


def remove_policies(stage: Stage) -> None:
    """Remove the policies of the stages before ``stage``, except those of the last ``actor.keep_policies`` stages.

    Call it once ``stage`` has begun; it can be repeated after a kill. Always kept are the run's first policy, policies
    that wait for an evaluation or that engines of a live run may still load, and whatever lies behind a link, such as
    the policies of the run that this one branched from.
    """
    if stage.number == 0:  # every start of a run passes through stage 0: remove what killed removals have left
        for leftover in stage.run.root.glob(f"stages/*/{leftover_name('policy')}"):
            shutil.rmtree(leftover, ignore_errors=True)
    if (keep := stage.run.recipe.actor.keep_policies) is None:
        return
    for number in range(1, stage.number - keep):  # oldest first, so that a kill leaves no gap between kept policies
        old = stage.run.stage(number)
        needed = old.run.lacks_evaluation(old.first_update) or old.first_update >= stage.oldest_needed
        own = stage.run.root.resolve() / old.policy.relative_to(stage.run.root)  # a link may lead to another run's
        if needed or old.policy.resolve() != own or not own.exists():
            continue
        try:
            remove_directory(old.policy)
        except OSError as error:  # costs disk space, but need not stop the run
            print(f"cannot remove {old.policy} ([actor] keep_policies): {error.strerror}", flush=True)


def require_policy(stage: Stage) -> Path:
    """The path of the stage's policy; `UserError` if it does not exist yet, or was removed."""
    check_kept(stage)
    if not stage.policy.exists():
        raise UserError(f"{stage.policy} does not exist: optimize stage {stage.number - 1} first")
    return stage.policy


def check_kept(stage: Stage) -> None:
    """`UserError` if the stage's policy was removed, with the way to get it."""
    if stage.policy_was_removed():
        raise UserError(
            f"{stage.policy} was removed, by [actor] keep_policies or by hand; "
            f"`megarl export {quoted(stage.run.root)} --stage {stage.previous.number} --update {stage.first_update} "
            "--output DIR` makes it again while keep_stages keeps its checkpoint; "
            f"with DIR = {stage.policy} it is restored in place"
        )
