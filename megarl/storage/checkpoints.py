"""The directory of a checkpoint: its manifest, written last, and the checks that its files agree with it.

What is inside the files is Megatron's and `megarl.actor.checkpoint`'s. Here they are names, sizes and checksums.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.storage.checked_json import decode, encode
from megarl.storage.files import file_sha256, fsync_path
from megarl.storage.metrics_log import Position

MANIFEST = "manifest.json"
METRICS = "metrics.jsonl"  # a copy of the lines of the stage's updates
_NAME = re.compile(r"update_(\d{6,})")


class Damaged(Exception):
    """A checkpoint is not what was written; the message says what is wrong with which file."""


@dataclass(frozen=True)
class FileSum:
    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileSum:
        return cls(path.stat().st_size, file_sha256(path))


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of. ``position``: of metrics.jsonl when it was taken."""

    update: int  # of the stage
    files: dict[str, FileSum]  # by name, without the manifest itself
    position: Position


def checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(update inside the stage, path) of every complete checkpoint, oldest first."""
    found = ((_NAME.fullmatch(path.name), path) for path in directory.glob("update_*"))
    return sorted((int(match[1]), path) for match, path in found if match)


def checkpoint_path(directory: Path, update: int) -> Path:
    return directory / f"update_{update:06d}"


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Not synced: `atomic_directory` does that for the whole checkpoint."""
    (path / MANIFEST).write_bytes(encode(asdict(manifest), indent=1))


def read_manifest(path: Path) -> Manifest:
    """Of the checkpoint ``path``, whose name says its update; `Damaged` unless it can be relied on."""
    try:
        fields = decode((path / MANIFEST).read_bytes(), needs_checksum=True)
        files = {name: FileSum(**entry) for name, entry in fields["files"].items()}
        manifest = Manifest(fields["update"], files, Position(**fields["position"]))
    except PermissionError:
        raise  # not damage
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{MANIFEST}: {error}") from error
    if path.name != checkpoint_path(path.parent, manifest.update).name:
        raise Damaged(f"{MANIFEST} is of update {manifest.update}")
    return manifest


def check_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """`Damaged` unless the files of these ``names`` are as the manifest says; reads all of them."""
    for name in names:
        try:
            found = FileSum.of(path / name)
        except PermissionError:
            raise
        except OSError as error:
            raise Damaged(f"{name}: {error.strerror}") from error
        expected = manifest.files[name]
        if found.bytes != expected.bytes:
            raise Damaged(f"{name} has {found.bytes} bytes, not {expected.bytes}")
        if found != expected:
            raise Damaged(f"{name} does not match its checksum")


def read_metrics(path: Path, manifest: Manifest) -> bytes:
    """The copy of the metrics lines in a checkpoint; `Damaged` unless it is as it was written."""
    check_files(path, manifest, [METRICS])
    return (path / METRICS).read_bytes()


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that nothing loads it but a person can look at it; returns the new path."""
    names = (f"damaged_{path.name}{suffix}" for suffix in itertools.chain([""], map(".{}".format, itertools.count(1))))
    target = next(path.parent / name for name in names if not (path.parent / name).exists())
    os.rename(path, target)
    fsync_path(path.parent)
    return target
