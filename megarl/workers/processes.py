"""Starts the processes of a phase on one node, warm or cold, and supervises them until all have ended.

Warm: forks of the warm process (`megarl.workers.warm`), of which each node has one per run and which has imported
everything. Cold: new interpreters, for engines that must be imported in a process of their own. Each process leads a
session of its own, and none outlives the node agent that started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import TYPE_CHECKING, Any

import psutil

from megarl.errors import STOP_SIGNALS, PhaseFailed
from megarl.phases import PHASES
from megarl.workers.warm import CHECK, GENERATION, LAST_WORDS, TRAINING, Call, run_phase_process
from megarl.workers.watch import Stall, Watch

if TYPE_CHECKING:
    from megarl.recipe.tables import Recipe

POLL_SECONDS = 0.05
SECOND_CTRL_C_SECONDS = 1.0  # SIGINTs at least so far apart are two presses of Ctrl-C; terminals may repeat a signal
ABANDON_SECONDS = 1.0  # from SIGKILL until the warm process, which may hang and so not report ends, is killed too
SHUTDOWN_SECONDS = 30.0  # from the request to stop to SIGKILL; overridden by MEGARL_SHUTDOWN_SECONDS
STALLED = "stalled"  # why a phase is aborted on all nodes if a process of one of them stalled
SESSION_SECONDS = 120.0  # until a killed process must have ended; freeing a lot of GPU memory takes a while


@dataclass(frozen=True)
class Process:
    """How to start one process of a phase."""

    phase: str
    run: str  # run directory
    stage: int
    log: str  # file for its stdout and stderr
    environment: dict[str, str]  # variables to add to the agent's own


class Processes:
    """The started processes of a phase on this node; ``index`` is an index into ``pids``."""

    def __init__(self, pids: list[int], parent: WarmProcess | ColdProcesses) -> None:
        self.pids, self._parent = pids, parent
        self._codes: dict[int, int] = {}

    def poll(self, seconds: float) -> dict[int, int]:
        """{index: exit code} of all processes that have ended; waits up to ``seconds`` for another one to end."""
        left = [pid for index, pid in enumerate(self.pids) if index not in self._codes]
        try:
            ended = self._parent.ended(left, seconds)
        except OSError:  # the warm process has ended, and the kernel kills its forks with it
            assert isinstance(self._parent, WarmProcess)
            for pid in left:
                _signal(pid, signal.SIGKILL, group=True)
            ended = self._parent.ended_before_it(left)
        self._codes |= {self.pids.index(pid): code for pid, code in ended.items()}
        return self._codes

    def signal(self, index: int, number: int, group: bool) -> None:
        """Send a signal to a process, or with ``group`` to its process group; nothing if the process has ended."""
        if index not in self._codes:
            _signal(self.pids[index], number, group)

    def abandon(self) -> None:
        """Kill the process that forked them, if any: it may hang too and never report that they have ended."""
        self._parent.kill()


def _signal(pid: int, number: int, group: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        if group:
            with contextlib.suppress(ProcessLookupError):  # it does not lead a process group yet
                os.killpg(pid, number)
        os.kill(pid, number)


class ColdProcesses:
    """Processes started as new interpreters: ``python -m megarl.phases``. Their parent is the agent."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for started in map(_start_cold, processes):
                self._started[started.pid] = started
        except OSError:
            for started in self._started.values():
                started.kill()
            raise
        self.pids = list(self._started)

    def ended(self, pids: Sequence[int], seconds: float) -> dict[int, int]:
        time.sleep(seconds)
        return {pid: code for pid in pids if (code := self._started[pid].poll()) is not None}

    def kill(self) -> None: ...


def _start_cold(process: Process) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-u", "-m", "megarl.phases", process.phase, process.run, str(process.stage)]
    with open(process.log, "ab") as log:
        environment = {**os.environ, **process.environment, "MEGARL_AGENT_PID": str(os.getpid())}
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )


class WarmProcess:
    """The agent's handle of a warm process (`megarl.workers.warm`), and its end of the connection to it."""

    def __init__(self, module: str = "megarl.workers.warm") -> None:
        self._connection, theirs = Pipe()
        self._last_words, writer = os.pipe()
        os.set_blocking(self._last_words, False)
        self.process = self._start(theirs, module)
        theirs.close()
        with contextlib.suppress(OSError):  # it has ended: `fork` will notice
            send_handle(self._connection, writer, self.process.pid)
        os.close(writer)
        self._forked: list[list[int] | None] = []
        self._codes: dict[int, int] = {}
        self._recipe: Recipe | None = None  # for which it was told to prepare

    def _start(self, theirs: Connection, module: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-u", "-m", module, str(theirs.fileno())]
        environment = {**os.environ, "MEGARL_AGENT_PID": str(os.getpid())}
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment, start_new_session=True
        )

    def prepare(self, recipe: Recipe) -> None:
        """Have it import what the recipe needs while it has no other orders; returns at once."""
        if self._recipe != recipe:
            self._recipe = recipe
            self.tell("prepare", recipe)

    def tell(self, *order: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended: `fork` will notice
            self._connection.send(order)

    def fork(self, level: int, calls: Sequence[Call], patience: float) -> list[int] | None:
        """One fork for each call, after the imports of ``level``; returns the process ids, None if it must not fork.

        Raises OSError if the warm process has ended, or does not answer within ``patience`` seconds.
        """
        self._heard()  # no more than the forks of one order may be in the pipe, or a fork could not end
        self._connection.send(("fork", level, list(calls)))
        waited = 0.0
        while not self._forked:
            self._receive(POLL_SECONDS)
            if (waited := waited + POLL_SECONDS) > patience:  # leaves out time in which this process is suspended
                raise TimeoutError(f"the warm process did not answer for {patience:g} s")
        return self._forked.pop()

    def ended(self, pids: Sequence[int], seconds: float) -> dict[int, int]:
        """{pid: exit code} of those that have ended and were not returned before; waits up to ``seconds`` for one.

        Raises OSError if the warm process itself has ended.
        """
        if self._codes.keys().isdisjoint(pids):
            self._receive(seconds)
        return {pid: self._codes.pop(pid) for pid in pids if pid in self._codes}

    def ended_before_it(self, pids: Sequence[int]) -> dict[int, int]:
        """{pid: exit code} once the warm process has ended: of those that it did not kill with it, their own."""
        codes = self._heard() | self._codes
        return {pid: codes.get(pid, -signal.SIGKILL) for pid in pids}

    def _heard(self) -> dict[int, int]:
        """What forks have written since the last call, as {pid: exit code}."""
        written = b""
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self._last_words, 1 << 16):
                written += part
        return dict(LAST_WORDS.iter_unpack(written))

    def _receive(self, seconds: float) -> None:
        while self._connection.poll(seconds):
            try:
                kind, *answer = self._connection.recv()
            except EOFError as error:
                raise ConnectionResetError("the warm process has ended") from error
            if kind == "forked":
                self._forked.append(answer[0])
            else:
                self._codes[answer[0]] = answer[1]
            seconds = 0.0

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        self._connection.close()
        os.close(self._last_words)
        self.process.kill()
        self.process.wait()


class Starter:
    """Starts the processes of one phase after another on this node, and owns the node's warm process."""

    def __init__(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self._warm: WarmProcess | None = None
        self._always_cold = False  # a warm process could not fork: an import failed or initialised CUDA
        self._patience = 0.0  # timeout for the warm process's answers
        self.complaint = ""  # message, if the warm process did not answer; whoever shows it empties it

    def warm_up(self) -> WarmProcess:
        """Start the warm process if it is not running; returns without waiting for its imports."""
        if self._warm is not None and self._warm.process.poll() is not None:
            self.close()
        if self._warm is None:
            self._warm = WarmProcess()
        return self._warm

    def prepare(self, recipe: Recipe) -> None:
        """Have the warm process import what the recipe needs; returns at once."""
        self._patience = recipe.run.stall_seconds
        if not self._always_cold:
            self.warm_up().prepare(recipe)

    def start(self, processes: Sequence[Process], recipe: Recipe, cold: bool) -> Processes:
        """Start the processes of a phase: cold if asked for or if the warm process fails, else as forks of it."""
        if cold and self._warm is not None:
            self._warm.tell("started")
        if not cold:
            self.prepare(recipe)
            level = TRAINING if PHASES[processes[0].phase].actor else GENERATION
            if forked := self._fork(level, [(run_phase_process, tuple(vars(one).values())) for one in processes]):
                return Processes(*forked)
        started = ColdProcesses(processes)
        return Processes(started.pids, started)

    def run(self, recipe: Recipe, function: Callable[..., int], *arguments: Any) -> int | None:
        """Call a function in a fork of the warm process; returns its exit code, None if the warm process failed."""
        self.prepare(recipe)
        if not (forked := self._fork(CHECK, [(function, arguments)])):
            return None
        (pids, warm), waited = forked, 0.0
        try:
            while not (ended := warm.ended(pids, POLL_SECONDS)):
                if (waited := waited + POLL_SECONDS) > self._patience:
                    warm.kill()
        except OSError:
            return None
        return ended[pids[0]]

    def _fork(self, level: int, calls: Sequence[Call]) -> tuple[list[int], WarmProcess] | None:
        """The forks' process ids and their parent; None if the warm process failed or must not fork."""
        if self._always_cold or (warm := self._warm) is None:
            return None
        try:
            pids = warm.fork(level, calls, self._patience)
        except OSError as error:  # it was killed or hangs: a cold start works, or shows the error
            self.complaint = str(error) if isinstance(error, TimeoutError) else ""
            self.close()
            return None
        self._always_cold = pids is None
        return (pids, warm) if pids else None

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
    aborted: Callable[[], str] = lambda: "",
    saves: bool = True,
) -> Ended:
    """Wait until all processes have ended. If one fails, or this agent gets a stop signal, the others get SIGTERM.

    If ``watch`` finds a stalled process, or another node aborts the phase, all are killed: they could not save work.

    stop_signals: the list of (number, time) that `stop_signals_noted` fills.
    aborted: `Nodes.aborted`.
    saves: whether the phase saves its work before it stops; affects only the message on stderr.

    A second Ctrl-C kills at once. A second SIGTERM does not, because Slurm sends one when a job should end and another
    when its time limit is reached.
    """
    everybody = range(len(processes.pids))
    codes, stall, reason = processes.poll(0), None, ""
    while len(codes) < len(everybody) and not (_failed(codes) or stop_signals or stall or reason):
        codes = processes.poll(POLL_SECONDS)
        stall, reason = watch.check(processes.pids, codes) if watch else None, aborted()
    if stall or reason:
        if watch and reason == STALLED:
            stall = stall or watch.stopped(processes.pids)  # the other node may only have waited for this one
        notes = watch.dump(processes.pids) if watch and (stall or reason == STALLED) else []
        codes = _kill_and_wait(processes, hangs=stall is not None)
        stall = stall and replace(stall, text="\n".join([stall.text, *notes]))
        return Ended(dict(codes), frozenset(_failed(codes)), bool(stop_signals), stall)
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
        if time.monotonic() > deadline or _second_ctrl_c(stop_signals) or aborted():
            kill(processes)
        if time.monotonic() > deadline + ABANDON_SECONDS:
            processes.abandon()
        codes = processes.poll(POLL_SECONDS)
    end_sessions(processes.pids)
    return Ended(dict(codes), first, bool(stop_signals))


def _kill_and_wait(processes: Processes, hangs: bool) -> dict[int, int]:
    """Kill all processes and wait for their ends; returns exit codes. hangs: the warm process may be what hangs."""
    deadline = time.monotonic() + (0.0 if hangs else ABANDON_SECONDS)
    codes = processes.poll(0)
    while len(codes) < len(processes.pids):
        kill(processes)
        if time.monotonic() >= deadline:
            processes.abandon()
        codes = processes.poll(POLL_SECONDS)
    end_sessions(processes.pids)
    return codes


def _second_ctrl_c(stop_signals: Sequence[tuple[int, float]]) -> bool:
    times = [at for number, at in stop_signals if number == signal.SIGINT]
    return bool(times) and times[-1] - times[0] > SECOND_CTRL_C_SECONDS


def kill(processes: Processes) -> None:
    """Send SIGKILL to all processes and their process groups."""
    for index in range(len(processes.pids)):
        processes.signal(index, signal.SIGKILL, group=True)


def _failed(codes: dict[int, int]) -> list[int]:
    return [index for index, code in codes.items() if code != 0]


def end_sessions(leaders: Collection[int]) -> None:
    """Kill what is left in the sessions of ended processes, ``leaders``, and wait until it is gone.

    An engine's workers are killed here. The guard of an engine's server, which has a process group of its own, is not:
    it ends the server by itself. `PhaseFailed` if processes are left after `SESSION_SECONDS`: they still hold their
    GPUs.
    """
    deadline = time.monotonic() + SESSION_SECONDS
    while left := [pid for pid in psutil.pids() if _lives_in(pid, leaders)]:
        if time.monotonic() > deadline:
            raise PhaseFailed(
                f"processes {left} of an ended phase still run {SESSION_SECONDS:.0f} s after they were killed, and may "
                "hold GPU memory: end them, then start the run again"
            )
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) in leaders:  # not the guard of a server
                    os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def _lives_in(pid: int, leaders: Collection[int]) -> bool:
    try:
        return os.getsid(pid) in leaders and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, PermissionError, psutil.Error):
        return False


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
