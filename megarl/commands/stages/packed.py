"""The format of a packed stage: files and a manifest of their sizes and checksums, as a directory or a tar file.

A packed stage may come from an untrusted source. So only plain paths below a few folders are accepted, every size is
known before anything is written, every file is a regular file with its checksum, and nothing is decompressed or
unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self

from megarl.errors import UserError
from megarl.storage.checked_json import decode, encode
from megarl.storage.checkpoints import FileSum
from megarl.storage.files import disk_errors, make_directory

MANIFEST, CARD, RECIPE = "manifest.json", "README.md", "recipe.toml"
POLICY, FIRST_POLICY, ROLLOUTS, CHECKPOINTS, FILES = "policy", "first_policy", "rollouts", "checkpoints", "files"
FORMAT = 1
MAX_MANIFEST = 16 << 20  # bytes
MAX_NAME = 100  # bytes; the header of a tar file has no room for more
BLOCK = 512  # bytes of a block in a tar file
# files that could be executed or unpickled when a model is loaded; megarl needs none of them
UNWANTED = (".py", ".pyc", ".so", ".sh", ".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".h5", ".msgpack", ".zip")
_PART = r"\.?[A-Za-z0-9_][A-Za-z0-9_.+=@-]*"
_NAME = re.compile(
    rf"{RECIPE}|({POLICY}|{FIRST_POLICY}|{ROLLOUTS}|{FILES})/{_PART}|{CHECKPOINTS}/update_\d{{6,}}/{_PART}"
)


@dataclass(frozen=True)
class Manifest:
    """The contents of a packed stage."""

    stage: int  # its number in the run that it comes from
    model: str  # name of the run's base model, only for people
    weights_hash: str  # of the policy that generated the rollouts
    licence: str
    prompts: dict[str, str]  # {name below files/: sha256} of the recipe's prompt files and templates, packed or not
    files: dict[str, FileSum]  # by name, without the manifest itself and the card, which only people read

    def dump(self) -> bytes:
        return encode({"format": FORMAT} | asdict(self), indent=1)

    @classmethod
    def parse(cls, data: bytes, where: Path) -> Self:
        """Decode and check a manifest; ``where`` is named in the `UserError` for one that is not valid."""
        try:
            fields = decode(data, needs_checksum=True)
            if fields.pop("format") != FORMAT:
                raise ValueError("it was packed by a version of megarl with another format")
            files = {str(name): FileSum(**sums) for name, sums in fields.pop("files").items()}
            manifest = cls(**fields, files=files)
            manifest._check()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{where}: the manifest of this packed stage is unusable: {error}") from error
        return manifest

    def _check(self) -> None:
        texts = (self.model, self.weights_hash, self.licence, *self.prompts.values())
        if type(self.stage) is not int or self.stage < 0 or not all(isinstance(text, str) for text in texts):
            raise ValueError("a field has the wrong type")
        for name, sums in self.files.items():
            check_name(name)
            sizes = type(sums.bytes) is int and sums.bytes >= 0
            if not sizes or not isinstance(sums.sha256, str) or not re.fullmatch("[0-9a-f]{64}", sums.sha256):
                raise ValueError(f"{name} has no size and checksum")
        for name in self.prompts:
            check_name(f"{FILES}/{name}")
        needed = {RECIPE, f"{ROLLOUTS}/SEALED", f"{ROLLOUTS}/ledger.jsonl", f"{POLICY}/megarl.json"}
        if absent := needed - self.files.keys():
            raise ValueError(f"it lacks {min(absent)}")

    def below(self, folder: str) -> dict[str, FileSum]:
        """The files of ``folder``, by their names inside it."""
        return {
            name.removeprefix(f"{folder}/"): sums for name, sums in self.files.items() if name.startswith(f"{folder}/")
        }

    @property
    def has_weights(self) -> bool:
        return any(name.endswith(".safetensors") for name in self.below(POLICY))

    @property
    def bytes(self) -> int:
        return sum(sums.bytes for sums in self.files.values())


def check_name(name: str) -> None:
    """ValueError for a name that is not allowed in a packed stage."""
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME:
        raise ValueError(f"{name[:200]!a} is not allowed as the name of a file in a packed stage")
    # the pickled parts of checkpoints are allowed, since `megarl.actor.checkpoint` reads only plain data from them
    if name.endswith(UNWANTED) and not name.startswith(f"{CHECKPOINTS}/"):
        raise ValueError(f"{name!a} could contain code, which is not allowed in a packed stage")


class Source:
    """Reads a packed stage, a directory or a tar file: first its ``manifest``, then each file once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            raise UserError(f"{path} does not exist")
        self.is_tar = path.is_file()
        with self._all() as files:
            name, size, data = next(files, ("", 0, None))
            if name != MANIFEST or data is None:
                raise UserError(f"{path} is not a packed stage: its first file is not {MANIFEST}")
            self.manifest = Manifest.parse(data.read(min(size, MAX_MANIFEST)), path)

    def verify(self) -> None:
        """`UserError` if a file is missing, is not in the manifest, or differs from what the manifest says."""
        self._read(None)

    def copy_to(self, target: Path) -> None:
        """Write every file to ``target``, verified as by `verify`."""
        check_space(self.path, self.manifest, target)
        with disk_errors(target):
            self._read(target)
            (target / MANIFEST).write_bytes(self.manifest.dump())

    def _read(self, target: Path | None) -> None:
        left = dict(self.manifest.files)
        with self._all() as files:
            next(files)
            for name, size, data in files:
                if name == CARD:
                    continue  # has no checksum: only people read it, and they may edit it
                expected = left.pop(name, None)
                if expected is None:
                    raise UserError(f"{self.path} has {name[:200]!a}, which is not in its manifest, or occurs twice")
                if size != expected.bytes:
                    raise UserError(f"{self.path}: {name} has {size} bytes, but its manifest says {expected.bytes}")
                if _copy(data, size, target and target / name) != expected.sha256:
                    raise UserError(f"{self.path}: {name} does not match the checksum in its manifest")
        if left:
            raise UserError(f"{self.path} lacks {min(left)}, which its manifest names")

    @contextlib.contextmanager
    def _all(self) -> Iterator[Iterator[tuple[str, int, IO[bytes]]]]:
        """Iterate over (name, bytes, file object at its beginning) of each file, the manifest first."""
        if not self.is_tar:
            yield self._in_directory()
            return
        with open(self.path, "rb") as archive:
            yield self._in_tar(archive)

    def _in_directory(self) -> Iterator[tuple[str, int, IO[bytes]]]:
        for name in self._names():
            path = self.path / name
            if not path.resolve().is_relative_to(self.path.resolve()) or path.is_symlink():
                raise UserError(f"{path} is a link, which is not allowed in a packed stage")
            if not path.exists():
                if name == MANIFEST:
                    return
                raise UserError(f"{self.path} lacks {name}, which its manifest names")
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise UserError(f"{path} is not a regular file")
                yield name, os.fstat(file.fileno()).st_size, file

    def _names(self) -> Iterator[str]:
        """The names of all files; the manifest comes first, and its reader sets ``self.manifest`` before going on."""
        yield MANIFEST
        yield from self.manifest.files

    def _in_tar(self, archive: IO[bytes]) -> Iterator[tuple[str, int, IO[bytes]]]:
        """Read header by header: Python's reader would also obey extended headers, which may declare any size."""
        end = os.fstat(archive.fileno()).st_size
        while any(header := archive.read(BLOCK)):
            try:
                info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
            except tarfile.HeaderError as error:
                raise UserError(f"{self.path} is not the tar file of a packed stage: {error}") from error
            begin = archive.tell()
            if info.type != tarfile.REGTYPE:
                raise UserError(f"{self.path}: {info.name[:200]!a} is not a regular file, but of type {info.type!r}")
            if not 0 <= info.size <= end - begin:
                raise UserError(f"{self.path} ends in the middle of {info.name[:200]!a}")
            yield info.name, info.size, archive
            archive.seek(begin + -(-info.size // BLOCK) * BLOCK)


def check_space(name: object, manifest: Manifest, target: Path) -> None:
    """`UserError` if there is no space for the files of ``manifest`` beside ``target``. name: where they come from."""
    parent = next(folder for folder in target.parents if folder.exists())
    if manifest.bytes > (free := shutil.disk_usage(parent).free):
        sizes = f"{manifest.bytes / 2**30:.1f} GiB, but {parent} has {free / 2**30:.1f} GiB left"
        raise UserError(f"{name} needs {sizes}")


def _copy(source: IO[bytes], size: int, target: Path | None) -> str:
    """Copy ``size`` bytes to ``target`` (None: only read them); returns their sha256."""
    if target is not None:
        make_directory(target.parent)
    digest = hashlib.sha256()
    with open(target, "xb") if target else open(os.devnull, "wb") as file:
        while size and (data := source.read(min(size, 1 << 20))):
            digest.update(data)
            file.write(data)
            size -= len(data)
    return digest.hexdigest()


def write_tar(folder: Path, manifest: Manifest, target: Path) -> None:
    """Write the packed directory ``folder`` as a tar file without times and owners, the manifest first."""
    with open(target, "xb") as raw, tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in (MANIFEST, CARD, *manifest.files):
            info = tarfile.TarInfo(name)
            info.size, info.mode = (folder / name).stat().st_size, 0o644
            with open(folder / name, "rb") as file:
                archive.addfile(info, file)


def describe(manifest: Manifest) -> dict[str, Any]:
    """The main facts about a packed stage, for ``--json``."""
    return {
        "stage": manifest.stage,
        "model": manifest.model,
        "weights_hash": manifest.weights_hash,
        "weights": manifest.has_weights,
        "licence": manifest.licence,
        "files": len(manifest.files),
        "bytes": manifest.bytes,
    }
