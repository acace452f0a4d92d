"""The processes of a phase on one node: started warm or cold, watched until all have ended.

Warm: forks of a process that has imported everything (`megarl.workers.warm`), one a node and run. Cold: new
interpreters, for engines that want to be imported in a process of their own. Each process leads a session of its own,
and none outlives the node agent that started it.
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
INSISTS_SECONDS = 1.0  # a person who presses Ctrl-C again takes longer than a terminal that sends a signal twice
SHUTDOWN_SECONDS = 30.0  # from the request to stop to SIGKILL; MEGARL_SHUTDOWN_SECONDS overrides
PATIENCE_SECONDS = 3600.0  # with a warm process that does not answer, until the recipe is known
CANNOT_FORK = 3  # exit code of a warm process in which an import has initialised CUDA


@dataclass(frozen=True)
class Process:
    """What one process of a phase is started with."""

    phase: str
    run: str  # directory
    stage: int
    log: str  # file for all that it prints
    environment: dict[str, str]  # beside the agent's own


class Processes(Protocol):
    pids: list[int]

    def poll(self, seconds: float) -> dict[int, int]:
        """{index: exit code} of those that have ended; waits so long for one more."""

    def signal(self, index: int, number: int, group: bool) -> None:
        """To a process that has not ended, or to its whole session."""

    def abandon(self) -> None:
        """Rely no longer on what has started them: it may stand still too."""


class ColdProcesses:
    """New interpreters: ``python -m megarl.phases``."""

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
    """The agent's end of `megarl.workers.warm`."""

    def __init__(self, module: str = "megarl.workers.warm", patience: float = PATIENCE_SECONDS) -> None:
        self.patience = patience
        self._socket, theirs = socket.socketpair()
        self.process = self._start(theirs, module)
        theirs.close()
        self._received = b""
        self._started: list[int] | None = None
        self._codes: dict[int, int] = {}
        self.prepared: str | None = None

    def _start(self, theirs: socket.socket, module: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-u", "-m", module, str(theirs.fileno())]
        environment = {**os.environ, "MEGARL_AGENT_PID": str(os.getpid())}
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment, start_new_session=True
        )

    def prepare(self, run_dir: Path) -> None:
        """Import what the run needs, while there is nothing else to do."""
        if self.prepared != str(run_dir):
            self.prepared = str(run_dir)
            with contextlib.suppress(OSError):  # it ended: `start` will notice
                self._send({"prepare": str(run_dir)})

    def generating_elsewhere(self) -> None:
        """A phase was started cold: import what training needs meanwhile."""
        with contextlib.suppress(OSError):
            self._send({"started": True})

    def start(self, processes: Sequence[Process]) -> ForkedProcesses:
        """Raises OSError when the warm process has ended."""
        return ForkedProcesses(self, self.fork([vars(process) for process in processes]))

    def fork(self, orders: list[dict[str, Any]]) -> list[int]:
        """The process ids of one fork an order. OSError, and an end to it, when it does not answer for too long."""
        self._send({"start": orders})
        waited = 0.0
        while self._started is None:
            self._receive(POLL_SECONDS)
            if (waited := waited + POLL_SECONDS) > self.patience:  # when this process is suspended, no time passes
                self.process.kill()
                raise TimeoutError(f"the warm process did not answer for {self.patience:g} s")
        pids, self._started = self._started, None
        return pids

    def ended(self, pids: Sequence[int], seconds: float) -> dict[int, int]:
        """{pid: exit code} of those that have ended, each reported once; waits so long for the first.

        OSError when the warm process itself has ended.
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
    def __init__(self, warm: WarmProcess, pids: list[int]) -> None:
        self._warm, self.pids = warm, pids
        self._codes: dict[int, int] = {}

    def poll(self, seconds: float) -> dict[int, int]:
        try:
            ended = self._warm.ended(self.pids, seconds)
            self._codes |= {self.pids.index(pid): code for pid, code in ended.items()}
        except OSError:  # the kernel kills them with the warm process
            left = {i: pid for i, pid in enumerate(self.pids) if i not in self._codes}
            for pid in left.values():
                _signal(pid, signal.SIGKILL, group=True)
            while any(map(_runs, left.values())):  # the phase may be started again: nobody else must be writing then
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
            with contextlib.suppress(ProcessLookupError):  # it leads no session yet
                os.killpg(pid, number)
        os.kill(pid, number)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Starter:
    """Starts the processes of phases, one phase after another; holds the node's warm process."""

    def __init__(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self._warm: WarmProcess | None = None
        self._always_cold = False
        self.patience = PATIENCE_SECONDS
        self.gave_up: str | None = None  # on a warm process, in the last `start`, and why

    def warm_up(self) -> WarmProcess:
        """Start the warm process, if it does not run; returns at once."""
        if self._warm is not None and self._warm.process.poll() is not None:
            self._warm.close()
            self._warm = None
        if self._warm is None:
            self._warm = WarmProcess()
        self._warm.patience = self.patience
        return self._warm

    def start(self, processes: Sequence[Process], cold: bool) -> Processes:
        self.gave_up = None
        if cold and self._warm is not None:
            self._warm.generating_elsewhere()
        if not cold and not self._always_cold:
            warm = self.warm_up()
            try:
                warm.prepare(Path(processes[0].run))
                return warm.start(processes)
            except OSError as error:  # it cannot import or was killed: a cold start shows why, or works
                self._always_cold = warm.process.wait() == CANNOT_FORK
                self.gave_up = str(error) if isinstance(error, TimeoutError) else None
        return ColdProcesses(processes)

    def run(self, order: dict[str, Any]) -> int | None:
        """Have one fork of the warm process carry out ``order``. Returns its exit code; None where nothing can fork."""
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
    """How the processes of a phase ended on this node, by index."""

    codes: dict[int, int]  # of all; those that had to be killed have -SIGKILL
    first: frozenset[int]  # those that had failed before the others were asked to stop
    stopped: bool  # this agent was told to stop
    stall: Stall | None = None  # for which all were killed


def supervise(
    processes: Processes,
    stop_signals: Sequence[tuple[int, float]] = (),
    watch: Watch | None = None,
    saves: bool = True,
) -> Ended:
    """Wait until all processes have ended. When one fails, or this agent gets a stop signal, the rest is asked to stop.

    When ``watch`` finds one that stands still, all are killed, since they could not save anything. stop_signals:
    (number, time) as noted by `stop_signals_noted`. saves: whether the phase saves its work before it stops, which may
    take a while. A second Ctrl-C kills at once. A second SIGTERM does not: Slurm sends one when it wants a job to end,
    and another at the end of its time.
    """
    everybody = range(len(processes.pids))
    codes = processes.poll(0)
    while len(codes) < len(everybody) and not _failed(codes) and not stop_signals:
        codes = processes.poll(POLL_SECONDS)
        if watch and (stall := watch.look(processes.pids, codes)):
            return _end_stall(processes, watch, stall, stop_signals)
    if _failed(codes):
        codes = processes.poll(POLL_SECONDS)  # others that ended for the same reason
    elif stop_signals:
        print("stopping, saving" if saves else "stopping", file=sys.stderr, flush=True)
    first = frozenset(_failed(codes))
    deadline = time.monotonic() + float(os.environ.get("MEGARL_SHUTDOWN_SECONDS", SHUTDOWN_SECONDS))
    if len(codes) < len(everybody):
        for index in everybody:
            processes.signal(index, signal.SIGTERM, group=False)
    while len(codes) < len(everybody):
        if time.monotonic() > deadline or _insists(stop_signals):
            kill(processes)
        if time.monotonic() > deadline + INSISTS_SECONDS:
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


def _insists(stop_signals: Sequence[tuple[int, float]]) -> bool:
    times = [at for number, at in stop_signals if number == signal.SIGINT]
    return bool(times) and times[-1] - times[0] > INSISTS_SECONDS


def kill(processes: Processes) -> None:
    """End all at once, with everything in their sessions."""
    for index in range(len(processes.pids)):
        processes.signal(index, signal.SIGKILL, group=True)


def _failed(codes: dict[int, int]) -> list[int]:
    return [index for index, code in codes.items() if code != 0]


@contextlib.contextmanager
def stop_signals_noted() -> Iterator[list[tuple[int, float]]]:
    """Within, `STOP_SIGNALS` interrupt nothing: number and time (`time.monotonic`) of each are added to the list."""
    seen: list[tuple[int, float]] = []
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        signal.signal(number, lambda number, _: seen.append((number, time.monotonic())))
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
