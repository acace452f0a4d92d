"""The checks of a run directory at every start, before any phase runs, with repairs where they are possible.

Checked here are prompt files, the policies that are still read, the seals of all stages, and the metrics. The recipe is
verified when the run is opened, and shards and checkpoints when they are read.
"""

from __future__ import annotations

from megarl.errors import UserError
from megarl.storage.checkpoints import Damaged, checkpoints, read_manifest, read_metrics
from megarl.storage.files import write_atomic
from megarl.storage.ledger import check_seal, is_sealed
from megarl.storage.metrics import NOTHING, agrees
from megarl.storage.run_dir import RunDir, Stage, sealed


def check_run(run: RunDir) -> None:
    """`UserError` for changed prompt files, a damaged policy or seal, and metrics that cannot be restored."""
    try:
        _check_run(run)
    except OSError as error:
        raise UserError(f"cannot read {error.filename or run.root}: {error.strerror}") from error


def _check_run(run: RunDir) -> None:
    run.check_prompts()
    mend_metrics(run)
    for stage in run.stages():  # also finished ones, since no phase reads their rollouts again
        for directory in filter(is_sealed, (stage.rollouts, stage.unfinished)):
            check_seal(directory)
    with_policy = [stage for stage in [*run.stages(), run.end] if stage.policy.exists()]
    # only the first and the newest policy are still read
    for stage in {stage.number: stage for stage in with_policy[:1] + with_policy[-1:]}.values():
        sealed.check(stage.policy, _remedy(stage))
    for version in run.versions():
        path = run.version(version)
        sealed.check(path, f"Delete {path.parent} and start again: these policies are then exported again")


def _remedy(stage: Stage) -> str:
    if stage.number == 0:
        return "Restore it from a copy, or use another --run-dir: all later stages depend on it"
    what = f"stage {stage.number - 1} is then exported again from its last checkpoint"
    return f"Restore it from a copy, or delete {stage.policy} and start again: {what}"


def mend_metrics(run: RunDir) -> None:
    """Restore metrics.jsonl from the checkpoints' copies if it lacks lines that the newest checkpoint refers to.

    `UserError` if the copies do not have all of these lines.
    """
    if run.metrics.is_dir():
        raise UserError(f"{run.metrics} is a directory: move it away, then start again")
    position = sealed.newest_position(run.root)
    if agrees(run.metrics, position):
        return
    # without the stages of the run that this one branched from
    own = (stage for stage in run.stages() if not stage.checkpoints.is_symlink())
    lines = [line for stage in own for line in _lines_of(stage)]
    if NOTHING.after(lines) != position:
        raise UserError(
            f"{run.metrics} is damaged: it lacks lines to which the newest checkpoint refers, and the remaining "
            "checkpoints do not have copies of all its lines. Restore the file from a copy"
        )
    write_atomic(run.metrics, b"".join(lines))
    run.log_event("restored_metrics", updates=len(lines))


def _lines_of(stage: Stage) -> list[bytes]:
    """The metrics lines of a stage, from its newest checkpoint with an intact copy; empty if there is none."""
    for _, path in reversed(checkpoints(stage.checkpoints)):
        try:
            return read_metrics(path, read_manifest(path)).splitlines(keepends=True)
        except Damaged:
            continue
    return []
