"""Starts the processes of a phase on one node, warm or cold, and supervises them until all have ended.

Warm: forks of the warm process (`megarl.workers.warm`), of which each node has one per run and which has imported
everything. Cold: new interpreters, for engines that must be imported in a process of their own. Each process leads a
session of its own, and none outlives the node agent that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import psutil

from megarl.errors import STOP_SIGNALS
from megarl.workers.sessions import end_sessions
from megarl.workers.watch import Stall, Watch

POLL_SECONDS = 0.05
SECOND_CTRL_C_SECONDS = 1.0  # SIGINTs at least so far apart are two presses of Ctrl-C; terminals may repeat a signal
ABANDON_SECONDS = 1.0  # from SIGKILL until the warm process, which may hang and so not report ends, is killed too
SHUTDOWN_SECONDS = 30.0  # from the request to stop to SIGKILL; overridden by MEGARL_SHUTDOWN_SECONDS
PATIENCE_SECONDS = 3600.0  # timeout for answers of the warm process as long as no recipe sets another one
CANNOT_FORK = 3  # exit code of a warm process in which an import has initialised CUDA


@dataclass(frozen=True)
class Process:
    """How to start one process of a phase."""

    phase: str
    run: str  # run directory
    stage: int
    log: str  # file for its stdout and stderr
    environment: dict[str, str]  # variables to add to the agent's own


class Processes(Protocol):
    """The started processes of a phase on this node; ``index`` is an index into ``pids``."""

    pids: list[int]

    def poll(self, seconds: float) -> dict[int, int]:
        """{index: exit code} of all processes that have ended; waits up to ``seconds`` for another one to end."""

    def signal(self, index: int, number: int, group: bool) -> None:
        """Send a signal to a process, or with ``group`` to its process group; nothing if the process has ended."""

    def abandon(self) -> None:
        """Kill the process that forked them, if any: it may hang too and never report that they have ended."""


class ColdProcesses:
    """Processes started as new interpreters: ``python -m megarl.phases``."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self._started: list[subprocess.Popen[bytes]] = []
        try:
            self._started += map(_start_cold, processes)
        except OSError:
            for started in self._started:
                started.kill()
            raise
        self.pids = [process.pid for process in self._started]

    def poll(self, seconds: float) -> dict[int, int]:
        time.sleep(seconds)
        return {i: code for i, process in enumerate(self._started) if (code := process.poll()) is not None}

    def signal(self, index: int, number: int, group: bool) -> None:
        if self._started[index].returncode is None:
            _signal(self.pids[index], number, group)

    def abandon(self) -> None: ...


def _start_cold(process: Process) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-u", "-m", "megarl.phases", process.phase, process.run, str(process.stage)]
    with open(process.log, "ab") as log:
        environment = {**os.environ, **process.environment, "MEGARL_AGENT_PID": str(os.getpid())}
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )


class WarmProcess:
    """The agent's handle of the warm process, `megarl.workers.warm`, to which it talks through a socket."""

    def __init__(self, module: str = "megarl.workers.warm", patience: float = PATIENCE_SECONDS) -> None:
        """``patience``: seconds to wait for the process ids of forks."""
        self.patience = patience
        self._socket, theirs = socket.socketpair()
        self.process = self._start(theirs, module)
        theirs.close()
        self._received = b""
        self._started: list[int] | None = None
        self._codes: dict[int, int] = {}
        self.prepared: str | None = None  # the run directory that it was told to prepare for

    def _start(self, theirs: socket.socket, module: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-u", "-m", module, str(theirs.fileno())]
        environment = {**os.environ, "MEGARL_AGENT_PID": str(os.getpid())}
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment, start_new_session=True
        )

    def prepare(self, run_dir: Path) -> None:
        """Have it import what the run needs while it has no other orders; returns at once."""
        if self.prepared != str(run_dir):
            self.prepared = str(run_dir)
            with contextlib.suppress(OSError):  # it has ended: `start` will notice
                self._send({"prepare": str(run_dir)})

    def phase_started_cold(self) -> None:
        """Tell it that a phase runs in cold processes, so that meanwhile it imports what training needs."""
        with contextlib.suppress(OSError):
            self._send({"started": True})

    def start(self, processes: Sequence[Process]) -> ForkedProcesses:
        """Fork the processes of a phase. Raises OSError if the warm process has ended or does not answer."""
        return ForkedProcesses(self, self.fork([vars(process) for process in processes]))

    def fork(self, orders: list[dict[str, Any]]) -> list[int]:
        """One fork for each order; returns their process ids.

        Raises OSError if the warm process has ended; if it does not answer within ``patience`` seconds, it is killed.
        """
        self._send({"start": orders})
        waited = 0.0
        while self._started is None:
            self._receive(POLL_SECONDS)
            if (waited := waited + POLL_SECONDS) > self.patience:  # leaves out time in which this process is suspended
                self.process.kill()
                raise TimeoutError(f"the warm process did not answer for {self.patience:g} s")
        pids, self._started = self._started, None
        return pids

    def ended(self, pids: Sequence[int], seconds: float) -> dict[int, int]:
        """{pid: exit code} of those that have ended and were not returned before; waits up to ``seconds`` for one.

        Raises OSError if the warm process itself has ended.
        """
        if self._codes.keys().isdisjoint(pids):
            self._receive(seconds)
        return {pid: self._codes.pop(pid) for pid in pids if pid in self._codes}

    def _receive(self, seconds: float | None) -> None:
        ready, _, _ = select.select([self._socket], [], [], seconds)
        if not ready:
            return
        data = self._socket.recv(1 << 16)
        if not data:
            raise ConnectionResetError("the warm process has ended")
        *lines, self._received = (self._received + data).split(b"\n")
        for answer in map(json.loads, lines):
            if "started" in answer:
                self._started = answer["started"]
            else:
                self._codes[answer["ended"]] = answer["code"]

    def _send(self, order: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(order).encode() + b"\n")

    def close(self) -> None:
        self._socket.close()
        self.process.kill()
        self.process.wait()


class ForkedProcesses:
    """Processes forked by the warm process, which reports their ends."""

    def __init__(self, warm: WarmProcess, pids: list[int]) -> None:
        self._warm, self.pids = warm, pids
        self._codes: dict[int, int] = {}

    def poll(self, seconds: float) -> dict[int, int]:
        try:
            ended = self._warm.ended(self.pids, seconds)
            self._codes |= {self.pids.index(pid): code for pid, code in ended.items()}
        except OSError:  # the warm process has ended, and the kernel kills its forks with it
            left = {i: pid for i, pid in enumerate(self.pids) if i not in self._codes}
            for pid in left.values():
                _signal(pid, signal.SIGKILL, group=True)
            while any(map(_runs, left.values())):  # none of them may still be writing when the phase is restarted
                time.sleep(POLL_SECONDS)
            self._codes |= dict.fromkeys(left, -signal.SIGKILL)
        return self._codes

    def signal(self, index: int, number: int, group: bool) -> None:
        if index not in self._codes:
            _signal(self.pids[index], number, group)

    def abandon(self) -> None:
        self._warm.process.kill()


def _signal(pid: int, number: int, group: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        if group:
            with contextlib.suppress(ProcessLookupError):  # it does not lead a process group yet
                os.killpg(pid, number)
        os.kill(pid, number)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Starter:
    """Starts the processes of one phase after another on this node, and owns the node's warm process."""

    def __init__(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self._warm: WarmProcess | None = None
        self._always_cold = False  # a warm process could not fork, since an import initialises CUDA
        self.patience = PATIENCE_SECONDS  # timeout for the warm process's answers
        self.warm_timeout: str | None = None  # message, if the warm process did not answer in the last `start`

    def warm_up(self) -> WarmProcess:
        """Start the warm process if it is not running; returns without waiting for its imports."""
        if self._warm is not None and self._warm.process.poll() is not None:
            self._warm.close()
            self._warm = None
        if self._warm is None:
            self._warm = WarmProcess()
        self._warm.patience = self.patience
        return self._warm

    def start(self, processes: Sequence[Process], cold: bool) -> Processes:
        """Start the processes of a phase: cold if asked for or if the warm process fails, else as forks of it."""
        self.warm_timeout = None
        if cold and self._warm is not None:
            self._warm.phase_started_cold()
        if not cold and not self._always_cold:
            warm = self.warm_up()
            try:
                warm.prepare(Path(processes[0].run))
                return warm.start(processes)
            except OSError as error:  # an import failed or it was killed: a cold start works, or shows the error
                self._always_cold = warm.process.wait() == CANNOT_FORK
                self.warm_timeout = str(error) if isinstance(error, TimeoutError) else None
        return ColdProcesses(processes)

    def run(self, order: dict[str, Any]) -> int | None:
        """Carry out ``order`` in a fork of the warm process; returns its exit code, None if the warm process failed."""
        if self._always_cold:
            return None
        warm = self.warm_up()
        try:
            (pid,) = warm.fork([order])
            waited = 0.0
            while not (ended := warm.ended([pid], POLL_SECONDS)):
                if (waited := waited + POLL_SECONDS) > self.patience:
                    warm.process.kill()
        except OSError:  # as in `start`
            self._always_cold = warm.process.wait() == CANNOT_FORK
            return None
        return ended[pid]

    def prepare(self, run_dir: Path) -> None:
        """Have the warm process import what the run needs."""
        self.warm_up().prepare(run_dir)

    def close(self) -> None:
        if self._warm is not None:
            self._warm.close()
            self._warm = None


@dataclass(frozen=True)
class Ended:
    """How the processes of a phase ended on this node; processes are given by their index."""

    codes: dict[int, int]  # exit codes of all processes; -SIGKILL of those that had to be killed
    first: frozenset[int]  # processes that had failed before the others were asked to stop
    stopped: bool  # this agent received a stop signal
    stall: Stall | None = None  # the stall because of which all were killed


def supervise(
    processes: Processes,
    stop_signals: Sequence[tuple[int, float]] = (),
    watch: Watch | None = None,
    saves: bool = True,
) -> Ended:
    """Wait until all processes have ended. If one fails, or this agent gets a stop signal, the others get SIGTERM.

    If ``watch`` finds a stalled process, all are killed, since they could not save anything.

    stop_signals: the list of (number, time) that `stop_signals_noted` fills.
    saves: whether the phase saves its work before it stops; affects only the message on stderr.

    A second Ctrl-C kills at once. A second SIGTERM does not, because Slurm sends one when a job should end and another
    when its time limit is reached.
    """
    everybody = range(len(processes.pids))
    codes = processes.poll(0)
    while len(codes) < len(everybody) and not _failed(codes) and not stop_signals:
        codes = processes.poll(POLL_SECONDS)
        if watch and (stall := watch.check(processes.pids, codes)):
            return _end_stall(processes, watch, stall, stop_signals)
    if _failed(codes):
        codes = processes.poll(POLL_SECONDS)  # others may have ended for the same reason
    elif stop_signals:
        print("stopping, saving" if saves else "stopping", file=sys.stderr, flush=True)
    first = frozenset(_failed(codes))
    deadline = time.monotonic() + float(os.environ.get("MEGARL_SHUTDOWN_SECONDS", SHUTDOWN_SECONDS))
    if len(codes) < len(everybody):
        for index in everybody:
            processes.signal(index, signal.SIGTERM, group=False)
    while len(codes) < len(everybody):
        if time.monotonic() > deadline or _second_ctrl_c(stop_signals):
            kill(processes)
        if time.monotonic() > deadline + ABANDON_SECONDS:
            processes.abandon()
        codes = processes.poll(POLL_SECONDS)
    end_sessions(processes.pids)
    return Ended(dict(codes), first, bool(stop_signals))


def _end_stall(processes: Processes, watch: Watch, stall: Stall, stop_signals: Sequence[tuple[int, float]]) -> Ended:
    text = "\n".join([stall.text, *watch.dump(processes.pids)])
    kill(processes)
    processes.abandon()
    while len(codes := processes.poll(POLL_SECONDS)) < len(processes.pids):
        kill(processes)
    end_sessions(processes.pids)
    return Ended(dict(codes), frozenset(), bool(stop_signals), replace(stall, text=text))


def _second_ctrl_c(stop_signals: Sequence[tuple[int, float]]) -> bool:
    times = [at for number, at in stop_signals if number == signal.SIGINT]
    return bool(times) and times[-1] - times[0] > SECOND_CTRL_C_SECONDS


def kill(processes: Processes) -> None:
    """Send SIGKILL to all processes and their process groups."""
    for index in range(len(processes.pids)):
        processes.signal(index, signal.SIGKILL, group=True)


def _failed(codes: dict[int, int]) -> list[int]:
    return [index for index, code in codes.items() if code != 0]


@contextlib.contextmanager
def stop_signals_noted() -> Iterator[list[tuple[int, float]]]:
    """Inside the context, `STOP_SIGNALS` interrupt nothing; (number, `time.monotonic`) of each is appended to the list.

    Afterwards the previous handlers are back in force.
    """
    received: list[tuple[int, float]] = []
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: received.append((number, time.monotonic())))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
