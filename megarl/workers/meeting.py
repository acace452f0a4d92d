"""What the agents of several nodes know of each other before they meet: two files in the run directory.

``secret``: 32 random bytes, made once a run, which only its owner can read. ``leader.json``: where the leader of the
current start listens; an older one leads nowhere, or to a store that does not know the secret.
"""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from pathlib import Path

from megarl.errors import PhaseFailed, UserError
from megarl.keystore import DIGEST, StoreClient, new_secret
from megarl.storage.files import make_directory, write_atomic

POLL_SECONDS = 0.1


def make_secret(run_dir: Path) -> bytes:
    """The leader: the run's secret, made by its first start."""
    make_directory(run_dir)
    path = run_dir / "secret"
    if not path.exists():
        write_atomic(path, new_secret(), 0o600)
    return read_secret(run_dir)


def read_secret(run_dir: Path) -> bytes:
    """FileNotFoundError where the leader has not made it yet; `UserError` where others may know or have written it."""
    path = run_dir / "secret"
    about = path.stat()
    if about.st_mode & 0o077 or about.st_uid != os.geteuid():
        raise UserError(
            f"{path} is to be read by its owner alone, who starts the run: chmod 600, or remove it when nothing runs"
        )
    secret = path.read_bytes()
    if len(secret) != DIGEST:
        raise UserError(f"{path} is damaged: remove it when nothing runs, and start the run again")
    return secret


def publish(run_dir: Path, address: str, port: int) -> None:
    """The leader: where it listens."""
    write_atomic(run_dir / "leader.json", json.dumps({"address": address, "port": port}))


def join(run_dir: Path, address: str, port: int, timeout: timedelta) -> tuple[StoreClient, str, int, bytes]:
    """A follower: wait for the leader. Its store, address, port, and the run's secret.

    ``port`` 0: where the leader has published that it listens. `PhaseFailed` if it is not there in time.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            secret = read_secret(run_dir)
            place = (address, port) if port else _published(run_dir)
            return StoreClient(*place, secret, timeout), *place, secret
        except (OSError, ValueError, KeyError) as error:  # not there yet, or still those of an earlier start
            if time.monotonic() > deadline:
                where = f"{address}:{port}" if port else f"what {run_dir / 'leader.json'} names"
                raise PhaseFailed(
                    f"cannot reach node 0 at {where}: {error}; the run directory must lie on a file system that all "
                    "nodes share, and MASTER_ADDR, if it is set, must name the first of them"
                ) from error
        time.sleep(POLL_SECONDS)


def _published(run_dir: Path) -> tuple[str, int]:
    place = json.loads((run_dir / "leader.json").read_text())
    return place["address"], place["port"]
