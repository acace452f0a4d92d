"""Which policies a run keeps: ``best/``, the evaluated one with the highest accuracy, and ``actor.keep_policies``.

A removed policy leaves a record, ``removed_policy.json`` in the directory of its stage, with its version and weights
hash. The shards that the policy generated have the same hash, so `megarl audit` can still verify which policy generated
what.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path

from megarl.data.tokenizer import files_of
from megarl.errors import UserError
from megarl.foreign import quoted
from megarl.storage.checked_json import read_checked, write_checked
from megarl.storage.files import atomic_directory, leftover_name, remove_directory
from megarl.storage.policies import INFO_FILE, PolicyInfo, read_info
from megarl.storage.run_dir import RunDir, Stage


def update_best_and_remove_policies(stage: Stage) -> None:
    """Update ``best``, then remove policies that are no longer needed; called when ``stage`` begins and is evaluated.

    Removed are policies exported between two stages, and stages' own policies as ``actor.keep_policies`` says.
    It can be repeated after a kill, since policies are removed only after ``best`` is complete.
    """
    run = stage.run
    keep_best(run)
    # older versions were removed already by the call at the beginning of the stage before
    oldest = run.stage(max(stage.number - 1, 0)).oldest_needed // run.recipe.schedule.updates_per_stage
    run.remove_versions_before(stage.oldest_needed, map(run.stage, range(oldest, stage.number)))
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
        scores, held = _scores(run), read_info(run.best).version
        # if its evaluations are lost, it goes only if there is another copy
        better = scores[held] < scores[version] if held in scores else run.version(held).exists()
        if not better:
            return
        run.best.rename(old)
    with atomic_directory(run.best) as temporary:
        for name in files_of(policy):
            (temporary / name).parent.mkdir(exist_ok=True)
            file = (policy / name).resolve()  # which is never written again
            try:
                os.link(file, temporary / name)
            except OSError:  # such as a file system without hard links
                shutil.copyfile(file, temporary / name)
    shutil.rmtree(old, ignore_errors=True)


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
        if needed or old.policy.resolve() != own or not (own / INFO_FILE).exists():
            continue
        try:
            info = read_info(old.policy)
        except UserError:
            continue  # megarl.json is damaged: the policy is kept, for `megarl audit`
        if info.version != old.first_update:
            continue
        write_checked(old.removed_policy, asdict(info))
        try:
            remove_directory(old.policy)
        except OSError as error:  # costs disk space, but need not stop the run
            print(f"cannot remove {old.policy} ([actor] keep_policies): {error.strerror}", flush=True)


def removed(stage: Stage) -> PolicyInfo | None:
    """The record of the stage's policy if that was removed, else None; `UserError` if the record is damaged."""
    if not stage.policy_was_removed():
        return None
    try:
        return PolicyInfo(**read_checked(stage.removed_policy, remedy := "Restore it from a copy"))
    except TypeError as error:
        raise UserError(f"{stage.removed_policy} is damaged: {error}. {remedy}") from error


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
            f"{stage.policy} was removed, as [actor] keep_policies says; "
            f"`megarl export {quoted(stage.run.root)} --stage {stage.previous.number} --update {stage.first_update} "
            "--output DIR` makes it again while keep_stages keeps its checkpoint; "
            f"with DIR = {stage.policy} it is restored in place"
        )
