"""Durable writes: a file or directory is either complete or absent, also after SIGKILL or a power loss."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from megarl.errors import PhaseFailed, UserError

APPEAR_SECONDS = 60.0  # on some shared file systems what another node has written becomes visible late
INTACT = "Everything sealed or saved so far is intact: free some space and start the same command again"


def appears(path: Path) -> bool:
    """Whether ``path`` exists. Of several nodes each waits until it sees what another one has written."""
    several = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    deadline = time.monotonic() + (APPEAR_SECONDS if several else 0.0)
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return path.exists()


def fsync_path(path: Path) -> None:
    """Flush one file or directory entry to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: str | bytes | memoryview, mode: int = 0o666) -> None:
    """Replace ``path`` by ``data`` through a synced temporary file and a rename. mode: 0o600 for secrets."""
    payload = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.tmp")
    with disk_errors(path):
        temporary.unlink(missing_ok=True)
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)  # on a full disk its space is needed
            raise
        fsync_path(path.parent)


def make_directory(path: Path) -> None:
    """Like ``mkdir -p``, but the new directories survive a power loss."""
    missing = [parent for parent in (path, *path.parents) if not parent.exists()]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        fsync_path(directory.parent)


def check_new(path: Path) -> None:
    """`UserError` if ``path`` exists."""
    if path.exists() or path.is_symlink():
        raise UserError(f"{path} exists already: choose a path that does not exist")


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory beside ``path``; on success sync all of it and rename it to ``path``.

    An error removes the temporary directory; those of killed attempts are removed first. Each attempt uses a unique
    name, so that a process left over from an earlier attempt cannot write into the new directory. ``path`` itself must
    not exist.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{time.monotonic_ns()}.tmp")
    with disk_errors(path):
        for leftover in path.parent.glob(f".{path.name}.*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        make_directory(temporary)
        try:
            yield temporary
        except (Exception, KeyboardInterrupt):  # not GeneratorExit: a fork that drops its copy must remove nothing
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        for file in sorted(temporary.rglob("*")):
            fsync_path(file)
        fsync_path(temporary)
        os.rename(temporary, path)
        fsync_path(path.parent)


def remove_directory(path: Path) -> None:
    """Remove a directory in such a way that a kill cannot leave half of it under its name.

    It is renamed to `leftover_name` first. A kill, or files that cannot be deleted yet, may leave a rest under that
    name. Raises OSError if it cannot be renamed; the directory is then unchanged.
    """
    leftover = path.with_name(leftover_name(path.name))
    shutil.rmtree(leftover, ignore_errors=True)
    path.rename(leftover)
    fsync_path(path.parent)
    shutil.rmtree(leftover, ignore_errors=True)  # NFS keeps files that a process has open


def leftover_name(name: str) -> str:
    """The name that `remove_directory` gives a directory before deleting it."""
    return f".{name}.removed.tmp"


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors while writing ``path`` into `UserError` or `PhaseFailed` with a message that names the path.

    They are a full disk, an exceeded quota, missing permissions, a directory in its place, and I/O errors.
    """
    try:
        yield
    except IsADirectoryError as error:
        raise UserError(f"{error.filename or path} is a directory: move it away, then start again") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(f"no space left while writing {path}. {INTACT}") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        if error.errno == errno.EIO:  # may be temporary, so another attempt is worthwhile
            raise PhaseFailed(f"cannot write {path}: {error.strerror}. Start the same command again") from error
        raise


@contextlib.contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn errors while reading ``path`` that may pass, such as those of a server, into `PhaseFailed`.

    Errors of a file that is missing, may not be read, or lies on damaged parts of a disk stay OSErrors.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
        raise
    except OSError as error:
        if error.errno == errno.EIO:
            raise
        raise PhaseFailed(f"cannot read {path}: {error.strerror}. Start the same command again") from error


def file_sha256(path: Path) -> str:
    """Checksum of a file's content, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
