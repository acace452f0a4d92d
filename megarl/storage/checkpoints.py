"""The directory of a checkpoint: its manifest, which is written last, and the check of its files against the manifest.

This module knows only names, sizes and checksums of the files; `megarl.actor.checkpoint` writes and reads them.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.storage.checked_json import Record, decode, encode
from megarl.storage.files import file_sha256, fsync_path, read_errors
from megarl.storage.metrics import Position

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"  # the directory of a stage with its checkpoints
METRICS = "metrics.jsonl"  # a copy of the lines of the stage's updates
_NAME = re.compile(r"update_(\d{6,})")


class Damaged(Exception):
    """A checkpoint differs from what was written; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class FileSum:
    """Size and checksum of a file."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileSum:
        return cls(path.stat().st_size, file_sha256(path))


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of."""

    update: int  # counted within the stage
    files: dict[str, FileSum]  # by name, without the manifest itself
    position: Position  # the end of metrics.jsonl when the checkpoint was taken


def checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(update inside the stage, path) of every complete checkpoint, oldest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in directory.glob("update_*"))
    return sorted((int(match[1]), path) for match, path in found if match)


def checkpoint_path(directory: Path, update: int) -> Path:
    return directory / f"update_{update:06d}"


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the manifest without syncing it: `atomic_directory` syncs the whole checkpoint."""
    (path / MANIFEST).write_bytes(encode(asdict(manifest), indent=1))


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint ``path``; `Damaged` if it is missing, unreadable or of another update."""
    try:
        fields, files = read_files(path)
        manifest = Manifest(fields["update"], files, Position(**fields["position"]))
    except (KeyError, TypeError) as error:
        raise Damaged(f"{MANIFEST}: {error}") from error
    if path.name != checkpoint_path(path.parent, manifest.update).name:
        raise Damaged(f"{MANIFEST} belongs to update {manifest.update}")
    return manifest


def read_files(path: Path) -> tuple[Record, dict[str, FileSum]]:
    """(all fields, the files) in the manifest of the directory ``path``; `Damaged` if it cannot be read."""
    try:
        with read_errors(path / MANIFEST):
            fields = decode((path / MANIFEST).read_bytes())
        return fields, {name: FileSum(**entry) for name, entry in fields["files"].items()}
    except PermissionError:
        raise  # not damage
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{MANIFEST}: {error}") from error


def check_files(path: Path, files: Mapping[str, FileSum]) -> None:
    """`Damaged` unless these files of the directory have these sizes and checksums; reads them completely."""
    for name, expected in files.items():
        try:
            with read_errors(path / name):
                found = FileSum.of(path / name)
        except PermissionError:
            raise
        except OSError as error:
            raise Damaged(f"{name}: {error.strerror}") from error
        if found.bytes != expected.bytes:
            raise Damaged(f"{name} has {found.bytes} bytes, not {expected.bytes}")
        if found != expected:
            raise Damaged(f"{name} does not match its checksum")


def read_metrics(path: Path, manifest: Manifest) -> bytes:
    """The checkpoint's copy of the stage's metrics lines; `Damaged` if it does not agree with the manifest."""
    check_files(path, {METRICS: manifest.files[METRICS]})
    return (path / METRICS).read_bytes()


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that no run loads it but a person can examine it; returns the new path.

    An earlier one of the same update is removed.
    """
    target = path.with_name(f"damaged_{path.name}")
    shutil.rmtree(target, ignore_errors=True)
    os.rename(path, target)
    fsync_path(path.parent)
    return target
