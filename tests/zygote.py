"""Runs `megarl` in forks of one process that has imported everything, which saves seconds for each command.

The warm process of a forked `megarl` is a fork too. All else is the code that users run.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import io
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megarl.linux import die_with_parent
from megarl.workers.processes import WarmProcess
from megarl.workers.warm import CHECK, Imports, be_warm_process, become, first_imports, serve
from tests.helpers import ROOT

CLONE_NEWNET = 0x40000000


def run_command(order: dict[str, Any]) -> int:
    """Run a command line of `megarl` in a fork; returns its exit code."""
    from megarl import cli
    from megarl.workers import processes

    become(order["log"], {})
    os.environ.clear()
    os.environ.update(order["environment"])
    os.dup2(os.open(order["errors"], os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    os.chdir(order["cwd"])
    if namespace := os.environ.get("MEGARL_TEST_NETWORK"):
        with open(namespace) as file:
            assert ctypes.CDLL(None).setns(file.fileno(), CLONE_NEWNET) == 0
    processes.WarmProcess = ForkedWarmProcess
    if order["hold"]:
        hold(*order["hold"])
    if order["mutant"]:
        getattr(importlib.import_module("tests.phases.mutants"), order["mutant"])()
    sys.argv = ["megarl", *order["arguments"]]
    try:
        cli.main(order["arguments"])
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


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


def call_held(held: list[Any], function: Any, arguments: tuple[Any, ...]) -> int:
    """Call a function, with `hold` for its file operations."""
    hold(*held)
    return function(*arguments)


class ForkedWarmProcess(WarmProcess):
    """The agent's end of a warm process that is a fork of the agent, where everything is imported already."""

    def _start(self, theirs: Connection, _: str) -> Any:
        agent = os.getpid()
        if pid := os.fork():
            return Child(pid)
        code = 1
        try:
            self._connection.close()
            os.setsid()
            os.environ["MEGARL_AGENT_PID"] = str(agent)
            be_warm_process(theirs, Imports(first_imports()))
            code = 0
        finally:
            os._exit(code)


class Child:
    """A forked process, with the methods of `subprocess.Popen` that an agent uses."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            done, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if done else None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.001)
        return self.returncode


class Command:
    """A running `megarl`, used like `subprocess.Popen`."""

    def __init__(
        self,
        zygote: WarmProcess,
        arguments: tuple[Any, ...],
        environment: dict[str, str],
        hold: list[Any] | None,
        mutant: str | None,
        cwd: Path = ROOT,
    ) -> None:
        self.zygote, self.returncode = zygote, None
        self.folder = tempfile.TemporaryDirectory(prefix="megarl-command-")
        self.outputs = [Path(self.folder.name) / name for name in ("stdout", "stderr")]
        order = {"log": str(self.outputs[0]), "errors": str(self.outputs[1])}
        order |= {"arguments": list(map(str, arguments)), "environment": environment}
        order |= {"hold": hold, "mutant": mutant, "cwd": str(cwd)}
        (self.pid,) = zygote.fork(CHECK, [(run_command, (order,))], 900.0)

    def poll(self, seconds: float = 0.0) -> int | None:
        if self.returncode is None:
            self.returncode = self.zygote.ended([self.pid], seconds).get(self.pid)
        return self.returncode

    def wait(self, timeout: float = 900.0) -> int:
        """The exit code; `subprocess.TimeoutExpired` after so many seconds."""
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


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(int(os.environ["MEGARL_AGENT_PID"]))
    os.register_at_fork(after_in_child=die_with_parent)
    serve(Connection(int(sys.argv[1])), Imports(itertools.chain(first_imports(), import_rest())))


def import_rest() -> Any:
    """Import what runs of the tests need beyond what all runs need, one module at each step."""
    names = [
        "megarl.cli",
        "megarl.workers.launcher",
        "megarl.commands.train",
        "megarl.commands.one_phase",
        "megarl.commands.evaluate",
        "megarl.workers.preflight",
    ]
    names += ["reasoning_gym", "transformers.models.qwen3_moe", "megarl.rollout.builtin"]
    names += ["megarl.phases.optimize", "megarl.actor.cpu_backend", "megarl.phases.live.trainer"]
    names += ["plotly.graph_objects", "rich.live"]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in names:
        importlib.import_module(name)
        yield


if __name__ == "__main__":
    main()
