"""How the agents of several nodes find the leader's store: through two files in the run directory.

``secret``: 32 random bytes, created once per run, which only their owner can read. ``leader.json``: address and port of
the leader's store; one of an earlier start is harmless: nothing listens there, or a store with another secret.
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
    """The run's secret, which is created if there is none yet. Called by the leader."""
    make_directory(run_dir)
    path = run_dir / "secret"
    if not path.exists():
        write_atomic(path, new_secret(), 0o600)
    return read_secret(run_dir)


def read_secret(run_dir: Path) -> bytes:
    """The run's secret.

    FileNotFoundError if the leader has not created it yet; `UserError` if the file is damaged, is another user's, or
    can be read or written by other users.
    """
    path = run_dir / "secret"
    about = path.stat()
    if about.st_mode & 0o077 or about.st_uid != os.geteuid():
        raise UserError(
            f"{path} must belong to the user who starts the run and be readable by nobody else: chmod 600 it, or "
            "delete it while the run is stopped"
        )
    secret = path.read_bytes()
    if len(secret) != DIGEST:
        raise UserError(f"{path} is damaged: delete it while the run is stopped, and start the run again")
    return secret


def publish(run_dir: Path, address: str, port: int) -> None:
    """Write the address of the leader's store to ``leader.json``. Called by the leader."""
    write_atomic(run_dir / "leader.json", json.dumps({"address": address, "port": port}))


def join(run_dir: Path, address: str, port: int, timeout: timedelta) -> tuple[StoreClient, str, int, bytes]:
    """Connect to the leader's store, waiting until it listens. Called by the agents of all other nodes.

    ``port`` 0: use address and port from ``leader.json``. Returns (store, address, port, the run's secret);
    `PhaseFailed` if the leader cannot be reached within ``timeout``.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            secret = read_secret(run_dir)
            place = (address, port) if port else _published(run_dir)
            return StoreClient(*place, secret, timeout), *place, secret
        except (OSError, ValueError, KeyError) as error:  # the files do not exist yet, or are those of an earlier start
            if time.monotonic() > deadline:
                where = f"{address}:{port}" if port else f"the address in {run_dir / 'leader.json'}"
                raise PhaseFailed(
                    f"cannot reach node 0 at {where}: {error}; the run directory must lie on a file system that all "
                    "nodes share, and MASTER_ADDR, if set, must name the first node"
                ) from error
        time.sleep(POLL_SECONDS)


def _published(run_dir: Path) -> tuple[str, int]:
    place = json.loads((run_dir / "leader.json").read_text())
    return place["address"], place["port"]
