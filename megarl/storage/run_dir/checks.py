"""The checks of what a run has written for good: of every file, for an audit, and of what each start reads again.

How the files of a directory are verified follows from their names:

| it has | it is | checksums |
|---|---|---|
| megarl.json, config.json | a policy | megarl.json has those of all other files |
| manifest.json | a checkpoint, or what was unpacked | manifest.json has those of all other files |
| ledger.jsonl, SEALED | rollouts, or the responses of an evaluation | the ledger has the shards', SEALED the ledger's |

Every other file has its checksum inside: JSON in the last field, and so has each line of a .jsonl file; texts in the
last line. That of metrics.jsonl is in the newest checkpoint.

A start checks prompt files, the policies that are still read, the seals of all stages, and the metrics, with repairs
where they are possible. The recipe is verified when the run is opened, and shards and checkpoints when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from megarl.errors import PhaseFailed, UserError
from megarl.storage.checked_json import read_checked, read_json_lines
from megarl.storage.checkpoints import (
    CHECKPOINTS,
    MANIFEST,
    METRICS,
    Damaged,
    check_files,
    checkpoints,
    read_files,
    read_manifest,
    read_metrics,
)
from megarl.storage.files import write_atomic
from megarl.storage.ledger import LEDGER, SEALED, Ledgers, check_seal, is_sealed, verify_shard
from megarl.storage.metrics import NOTHING, Position, agrees
from megarl.storage.policies import CONFIG_FILE, INFO_FILE, check_policy
from megarl.storage.run_dir import RunDir, Stage, recipes

# logs, files of and for other programs, scratch, and files that only say where a server or a tracker is
_NOT_SEALED = ("logs", "tensorboard", "wandb", "rehearsal", "trackers.json")


def damages(path: Path) -> Iterator[str]:
    """What is wrong with ``path``, a file or a directory with everything below it; one line of text for each damage.

    It reads all of it. Hidden files, checkpoints that were set aside, and logs are left out.
    """
    for verify in _checks(path):
        try:
            verify()
        except (UserError, PhaseFailed) as error:
            yield str(error)
        except OSError as error:
            yield f"cannot read {error.filename or path}: {error.strerror}"


def check(path: Path, remedy: str) -> None:
    """`UserError`, ending with ``remedy``, for the first of `damages`."""
    for damage in damages(path):
        raise UserError(f"{damage}. {remedy}")


def _checks(path: Path) -> Iterator[Callable[[], object]]:
    if not path.is_dir():
        yield partial(_check_file, path)
        return
    names = {file.name for file in path.iterdir()}
    if names & {INFO_FILE, CONFIG_FILE}:
        yield partial(check_policy, path)
        return
    if MANIFEST in names or path.parent.name == CHECKPOINTS:
        yield partial(_check_manifest, path)
        return
    if names & {SEALED, LEDGER}:
        yield from _check_store(path)
        names -= {SEALED, LEDGER}
    for name in sorted(names.difference(_NOT_SEALED)):
        if not name.startswith((".", "damaged_")):
            yield from _checks(path / name)


def _check_store(directory: Path) -> Iterator[Callable[[], object]]:
    if (directory / SEALED).exists():
        yield partial(check_seal, directory)
    ledgers = Ledgers(directory)
    yield ledgers.read
    yield from (partial(verify_shard, directory / entry.shard, entry) for entry in ledgers.entries)


def _check_manifest(path: Path) -> None:
    try:
        checkpoint = path.parent.name == CHECKPOINTS
        files = read_manifest(path).files if checkpoint else read_files(path)[1]
        check_files(path, files)
        if checkpoint and (extra := {file.name for file in path.iterdir()} - {*files, MANIFEST}):
            raise Damaged(f"{min(extra)} is not in its manifest")
    except Damaged as error:
        raise UserError(f"{path}: {error}") from error


def newest_position(run: Path) -> Position:
    """The end of a run's metrics.jsonl, according to the newest of its own checkpoints that can be read."""
    for folder in sorted(run.glob(f"stages/*/{CHECKPOINTS}"), reverse=True):
        for _, path in [] if folder.is_symlink() else reversed(checkpoints(folder)):
            try:
                return read_manifest(path).position
            except Damaged:
                continue  # the optimize phase will set it aside
    return NOTHING


def _check_file(path: Path) -> None:
    if path.name == METRICS:
        read_json_lines(path)
        if not agrees(path, newest_position(path.parent)):
            raise UserError(f"{path} is damaged: it does not have the lines to which the newest checkpoint refers")
    elif path.suffix == ".json":
        read_checked(path, "Restore it from a copy")
    elif path.suffix == ".jsonl":
        read_json_lines(path, needs_checksum=True)
    elif path.suffix == ".toml":
        recipes.load(path)


def check_run(run: RunDir) -> None:
    """`UserError` for changed prompt files, a damaged policy or seal, and metrics that cannot be restored."""
    try:
        run.check_prompts()
        mend_metrics(run)
        for stage in run.stages():  # also finished ones, since no phase reads their rollouts again
            for directory in filter(is_sealed, (stage.rollouts, stage.unfinished)):
                check_seal(directory)
        with_policy = [stage for stage in [*run.stages(), run.end] if stage.policy.exists()]
        # only the first and the newest policy are still read
        for stage in {stage.number: stage for stage in with_policy[:1] + with_policy[-1:]}.values():
            check(stage.policy, _remedy(stage))
        for version in run.versions():
            path = run.version(version)
            check(path, f"Delete {path.parent} and start again: these policies are then exported again")
    except OSError as error:
        raise UserError(f"cannot read {error.filename or run.root}: {error.strerror}") from error


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
    position = newest_position(run.root)
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
