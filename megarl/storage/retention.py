"""``actor.keep_policies``: a run lets go of the policies of finished stages, and remembers which they were.

A removed policy leaves ``removed_policy.json`` in the directory of its stage: its version and the hash of its weights,
which the shards that it generated carry too, so that `megarl audit` still follows who generated what.
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
    """When ``stage`` has begun, those of the stages before it, without the last ``actor.keep_policies`` of them.

    The run's first stays, and so does what waits for an evaluation, what engines of a live run may still load, and what
    belongs to the run that this one branched from, or lies behind another link. To be repeated after a kill.
    """
    if stage.number == 0:  # with which every start begins
        for directory in stage.run.root.glob("stages/*"):
            discard(directory / leftover_name("policy"))
    for old in reversed(list(_removable(stage))):  # the oldest first: whatever a kill leaves follows on what is gone
        if (info := _named(old)) is not None:
            write_checked(old.removed_policy, asdict(info))
            try:
                remove_directory(old.policy)
            except OSError as error:  # the disk is fuller, but the run goes on
                print(f"{old.policy} stays, though [actor] keep_policies lets go of it: {error.strerror}", flush=True)


def _named(stage: Stage) -> PolicyInfo | None:
    """What the stage's policy says of itself. None: nobody could tell later what it was, so it stays for the audit."""
    try:
        info = read_info(stage.policy) if (stage.policy / INFO_FILE).exists() else None
    except UserError:
        return None
    return info if info is not None and info.version == stage.first_update else None


def _removable(stage: Stage) -> Iterator[Stage]:
    """The newest first."""
    for number in may_be_removed(stage.run.recipe.actor.keep_policies, stage.number):
        old = stage.run.stage(number)
        if not old.policy.exists():
            discard(old.directory / leftover_name("policy"))
            continue
        waits = old.run.lacks_evaluation(old.first_update) or old.first_update >= stage.oldest_needed
        if not waits and _is_own(old):
            yield old


def _is_own(stage: Stage) -> bool:
    """Whether no link leads to the policy, which may be another run's."""
    return stage.policy.resolve() == stage.run.root.resolve() / stage.policy.relative_to(stage.run.root)


def removed(stage: Stage) -> PolicyInfo | None:
    """Which policy the stage had, where it was removed; `UserError` where the record of that is damaged."""
    if not stage.lost_policy():
        return None
    remedy = "Restore it from a copy"
    record = read_checked(stage.removed_policy, remedy, needs_checksum=True)
    try:
        info = PolicyInfo(**record)
    except TypeError as error:
        raise UserError(f"{stage.removed_policy} is damaged: {error}. {remedy}") from error
    hashes = [info.weights_hash, *info.files.values()] if isinstance(info.files, dict) else [None]
    if type(info.version) is not int or not all(isinstance(one, str) for one in hashes):
        raise UserError(f"{stage.removed_policy} is damaged: it names no version with its checksums. {remedy}")
    return info


def may_be_removed(keep: int | None, begun: int) -> range:
    """The stages whose policies ``actor.keep_policies`` lets go of once stage ``begun`` has begun; newest first."""
    return range(0 if keep is None else begun - keep - 1, 0, -1)


def require_policy(stage: Stage) -> Path:
    """The stage's policy; `UserError` where it is not there yet, or not any more."""
    check_kept(stage)
    if not stage.policy.exists():
        raise UserError(f"{stage.policy} does not exist: optimize stage {stage.number - 1} first")
    return stage.policy


def check_kept(stage: Stage) -> None:
    """`UserError` with what there is instead, where the stage's policy was removed."""
    if stage.lost_policy():
        raise UserError(f"{stage.policy} was removed, as [actor] keep_policies says; {_instead(stage)}")


def _instead(stage: Stage) -> str:
    run, before = stage.run, stage.previous
    updates = before.run.recipe.schedule.updates_per_stage
    if updates in dict(checkpoints(before.checkpoints)):
        command = f"megarl export {run.root} --stage {before.number} --update {updates} --output DIR"
        return f"a checkpoint is left of which `{command}` makes it again; DIR = {stage.policy} puts it back"
    nearest = min(_left(run), key=lambda one: abs(one[0] - stage.first_update))
    return f"the nearest that is left is {nearest[1]}, after update {nearest[0]} instead of {stage.first_update}"


def _left(run: RunDir) -> Iterator[tuple[int, Path]]:
    """(updates of the run, place) of every policy and checkpoint."""
    for stage in [*run.stages(), run.end]:
        if stage.policy.exists():
            yield stage.first_update, stage.policy
        yield from ((stage.first_update + update, path) for update, path in checkpoints(stage.checkpoints))
