"""``actor.keep_policies``: removes the policies of old finished stages, and keeps a record of each.

The record, ``removed_policy.json`` in the directory of the stage, has the policy's version and weights hash. The shards
that the policy generated have the same hash, so `megarl audit` can still verify which policy generated what.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from megarl.errors import UserError
from megarl.storage.checked_json import read_checked, write_checked
from megarl.storage.checkpoints import checkpoints
from megarl.storage.files import discard, leftover_name, remove_directory
from megarl.storage.policies import INFO_FILE, PolicyInfo, read_info
from megarl.storage.run_dir import RunDir, Stage


def remove_policies(stage: Stage) -> None:
    """Remove the policies of the stages before ``stage``, except those of the last ``actor.keep_policies`` stages.

    Call it once ``stage`` has begun; it can be repeated after a kill. Always kept are the run's first policy, policies
    that wait for an evaluation or that engines of a live run may still load, and whatever lies behind a link, such as
    the policies of the run that this one branched from.
    """
    if stage.number == 0:  # every start of a run passes through stage 0: remove what killed removals have left
        for directory in stage.run.root.glob("stages/*"):
            discard(directory / leftover_name("policy"))
    for old in reversed(list(_removable(stage))):  # oldest first, so that a kill leaves no gap between kept policies
        if (info := _recordable(old)) is not None:
            write_checked(old.removed_policy, asdict(info))
            try:
                remove_directory(old.policy)
            except OSError as error:  # costs disk space, but need not stop the run
                print(f"cannot remove {old.policy} ([actor] keep_policies): {error.strerror}", flush=True)


def _recordable(stage: Stage) -> PolicyInfo | None:
    """The version and hashes of the stage's policy, to be recorded before it is removed.

    None if ``megarl.json`` is missing, damaged or of another version: the policy is then kept, for `megarl audit`.
    """
    try:
        info = read_info(stage.policy) if (stage.policy / INFO_FILE).exists() else None
    except UserError:
        return None
    return info if info is not None and info.version == stage.first_update else None


def _removable(stage: Stage) -> Iterator[Stage]:
    """The stages before ``stage`` whose policies may be removed now, newest first."""
    for number in may_be_removed(stage.run.recipe.actor.keep_policies, stage.number):
        old = stage.run.stage(number)
        if not old.policy.exists():
            discard(old.directory / leftover_name("policy"))
            continue
        needed = old.run.lacks_evaluation(old.first_update) or old.first_update >= stage.oldest_needed
        if not needed and _is_own(old):
            yield old


def _is_own(stage: Stage) -> bool:
    """Whether the policy belongs to this run: one behind a link may be another run's."""
    return stage.policy.resolve() == stage.run.root.resolve() / stage.policy.relative_to(stage.run.root)


def removed(stage: Stage) -> PolicyInfo | None:
    """The record of the stage's policy if that was removed, else None; `UserError` if the record is damaged."""
    if not stage.policy_was_removed():
        return None
    remedy = "Restore it from a copy"
    record = read_checked(stage.removed_policy, remedy, needs_checksum=True)
    try:
        info = PolicyInfo(**record)
    except TypeError as error:
        raise UserError(f"{stage.removed_policy} is damaged: {error}. {remedy}") from error
    hashes = [info.weights_hash, *info.files.values()] if isinstance(info.files, dict) else [None]
    if type(info.version) is not int or not all(isinstance(value, str) for value in hashes):
        raise UserError(f"{stage.removed_policy} is damaged: it has no version with its checksums. {remedy}")
    return info


def may_be_removed(keep: int | None, begun: int) -> range:
    """The stages whose policies need not be kept once stage ``begun`` has begun, newest first.

    keep: ``actor.keep_policies``; None keeps all policies.
    """
    return range(0 if keep is None else begun - keep - 1, 0, -1)


def require_policy(stage: Stage) -> Path:
    """The path of the stage's policy; `UserError` if it does not exist yet, or was removed."""
    check_kept(stage)
    if not stage.policy.exists():
        raise UserError(f"{stage.policy} does not exist: optimize stage {stage.number - 1} first")
    return stage.policy


def check_kept(stage: Stage) -> None:
    """`UserError` if the stage's policy was removed, with the way to get it or a similar policy."""
    if stage.policy_was_removed():
        raise UserError(f"{stage.policy} was removed, as [actor] keep_policies says; {_alternative(stage)}")


def _alternative(stage: Stage) -> str:
    """How to make the stage's removed policy again from a checkpoint; if there is none, the nearest other policy."""
    run, before = stage.run, stage.previous
    updates = before.run.recipe.schedule.updates_per_stage
    if updates in dict(checkpoints(before.checkpoints)):
        command = f"megarl export {run.root} --stage {before.number} --update {updates} --output DIR"
        return f"`{command}` makes it again from a checkpoint; with DIR = {stage.policy} it is restored in place"
    update, path = min(_remaining(run), key=lambda item: abs(item[0] - stage.first_update))
    return f"the nearest that still exists is {path}, after update {update} instead of {stage.first_update}"


def _remaining(run: RunDir) -> Iterator[tuple[int, Path]]:
    """(updates of the run, path) of every policy and checkpoint that exists."""
    for stage in [*run.stages(), run.end]:
        if stage.policy.exists():
            yield stage.first_update, stage.policy
        yield from ((stage.first_update + update, path) for update, path in checkpoints(stage.checkpoints))
