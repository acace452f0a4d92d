"""Runs `megarl` in forks of a fork server that has imported everything (tests/preloaded.py), which saves seconds each.

The fork server of a forked `megarl` is a fork too. All else is the code that users run.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import io
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Callable
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any

import psutil

from megarl.phases.entry import become
from megarl.workers import processes
from tests.fork_servers import RUNS, functions

CLONE_NEWNET = 0x40000000


def run_command(order: dict[str, Any]) -> None:
    from megarl import cli

    become(order["log"], order["environment"])
    os.dup2(os.open(order["errors"], os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    os.chdir(order["cwd"])
    if namespace := os.environ.get("MEGARL_TEST_NETWORK"):
        with open(namespace) as file:
            assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0
    util.spawnv_passfds = fork_server
    if order["hold"]:
        hold(*order["hold"])
    if order["mutant"]:
        getattr(importlib.import_module("tests.phases.mutants"), order["mutant"])()
    sys.argv = ["megarl", *order["arguments"]]
    cli.run()


def hold(pattern: str, count: int, marker: str) -> None:
    """Make the ``count``-th file operation from now on that matches ``pattern`` hang until it is released.

    pattern: a regular expression for the operation written as ``open PATH`` or ``replace FROM TO``.
    marker: the file to which the operation first writes the id of its process. Whoever empties it releases the process.
    While it exists no other process is held. Forks of this process are held too; each counts its own operations.
    """
    seen, create = [0], os.open

    def released() -> bool:
        try:
            return os.stat(marker).st_size == 0
        except FileNotFoundError:  # for whoever will kill this process and wants the next one to be held
            return False

    def wait() -> None:
        try:
            file = create(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        os.write(file, str(os.getpid()).encode())
        os.close(file)
        while not released():
            time.sleep(0.01)

    def wrap(name: str, function: Any) -> Any:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            text = f"{name} {' '.join(str(x) for x in arguments[:2])}"
            if re.search(pattern, text):
                seen[0] += 1
                if seen[0] == count:
                    wait()
            return function(*arguments, **options)

        return wrapped

    builtins.open = io.open = wrap("open", open)
    os.open = wrap("open", os.open)
    os.replace, os.rename = wrap("replace", os.replace), wrap("replace", os.rename)


def fork_server(path: bytes, arguments: list[str], descriptors: list[int]) -> int:
    """Stands for `util.spawnv_passfds`, with which `multiprocessing` starts its fork server: starts it as a fork."""
    code = arguments[-1]
    if "forkserver" not in code:
        return SPAWN(path, arguments, descriptors)
    if pid := os.fork():
        return pid
    try:
        sys.modules.pop("megarl.phases.preload", None)  # an import begins its work
        exec(code)
    finally:
        os._exit(0)


SPAWN = util.spawnv_passfds


def new_fork_server(replace: Any = setattr) -> Callable[[], None]:
    """Have `multiprocessing` start another fork server, as a fork of this process. replace: monkeypatch.setattr.

    Returns a function that ends it, and requires that it has no forks left.
    """
    server = forkserver.ForkServer()
    replace(processes, "PRELOAD", "megarl.phases.preload")
    replace(util, "spawnv_passfds", fork_server)
    for name, function in functions(server).items():
        replace(forkserver, name, function)

    def end() -> None:
        if (pid := server._forkserver_pid) is not None:
            assert psutil.Process(pid).children() == []
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    return end


class Command:
    def __init__(self, arguments: tuple[Any, ...], **order: Any) -> None:
        """order: "environment", "hold", "mutant" and "cwd" of `run_command`."""
        self.returncode = None
        self.folder = tempfile.TemporaryDirectory(prefix="megarl-command-")
        self.outputs = [Path(self.folder.name) / name for name in ("stdout", "stderr")]
        order |= {"log": str(self.outputs[0]), "errors": str(self.outputs[1]), "arguments": list(map(str, arguments))}
        self.process = multiprocessing.get_context("forkserver").Process(target=run_command, args=(order,))
        patch = unittest.mock.patch.multiple
        with patch(forkserver, **functions(RUNS)), patch(util, spawnv_passfds=SPAWN):
            self.process.start()
        self.pid = self.process.pid

    def poll(self, seconds: float = 0.0) -> int | None:
        if self.returncode is None:
            self.process.join(seconds)
            self.returncode = self.process.exitcode
        return self.returncode

    def wait(self, timeout: float = 900.0) -> int:
        deadline = time.monotonic() + timeout
        while self.poll(0.05) is None:
            if time.monotonic() > deadline:
                self.kill()
                raise subprocess.TimeoutExpired(f"megarl with process id {self.pid}", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    @property
    def stdout(self) -> str:
        return self.outputs[0].read_text()

    @property
    def stderr(self) -> str:
        return self.outputs[1].read_text()
