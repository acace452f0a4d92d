"""The fork servers of tests. Workers of pytest-xdist share them, since each takes seconds to import what forks need."""

from __future__ import annotations

import os
import unittest.mock
from multiprocessing import connection, forkserver, util
from pathlib import Path
from typing import Any


class ForkServer(forkserver.ForkServer):
    def __init__(self, name: str, preload: list[str]) -> None:
        super().__init__()
        self.name, self.folder = name, ""
        self.set_forkserver_preload(preload)

    def start(self) -> None:
        """Start it in `multiprocessing`'s folder of temporary files. What its forks write to stderr is in `errors`."""
        self.folder = util.get_temp_dir()
        address, stderr = str(Path(self.folder, self.name)), os.dup(2)
        with open(self.errors, "w") as errors:
            os.dup2(errors.fileno(), 2)
        try:
            with unittest.mock.patch.object(connection, "arbitrary_address", return_value=address):
                super().ensure_running()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)

    @property
    def errors(self) -> Path:
        return Path(self.folder, f"{self.name}.stderr")

    def ensure_running(self) -> None:
        """Start one for this process alone, unless another process shares its own."""
        address = Path(self.folder, self.name)
        if not self.folder or not address.exists():
            super().ensure_running()
        elif self._forkserver_address is None:
            self._forkserver_address = str(address)
            self._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # each fork gets it


RUNS = ForkServer("runs", ["tests.preloaded"])
RANKS = ForkServer(
    "ranks", ["tests.actor.preloaded", "megarl.actor.checkpoint", "megarl.actor.reference", "tests.actor.layout_ranks"]
)


def functions(server: forkserver.ForkServer) -> dict[str, Any]:
    names = ("ensure_running", "connect_to_new_process", "set_forkserver_preload")
    return {name: getattr(server, name) for name in names}
