"""Starts the processes of a phase on one node, and supervises them until all have ended.

They are forks of the fork server of `multiprocessing` (`megarl.phases.preload`), or new interpreters ("spawn"), for
GPUs and some engines. Each leads a session of its own, and none outlives the node agent that started it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from megarl.errors import STOP_SIGNALS, PhaseFailed
from megarl.phases import preload
from megarl.phases.entry import read_end
from megarl.rollout.signals import kept_from_children
from megarl.workers.watch import Stall, Watch

if TYPE_CHECKING:
    from megarl.recipe.tables import Recipe

POLL_SECONDS = 0.05
SECOND_CTRL_C_SECONDS = 1.0  # SIGINTs at least so far apart are two presses of Ctrl-C; terminals may repeat a signal
SHUTDOWN_SECONDS = 30.0  # from the request to stop to SIGKILL; overridden by MEGARL_SHUTDOWN_SECONDS
# why a phase ends on all nodes: a process of one of them stalled, or agents were told to stop
STALLED, STOPPED = "stalled", "stopped"
SESSION_SECONDS = 120.0  # until a killed process must have ended; freeing a lot of GPU memory takes a while
NOT_REPORTED = 255  # the exit code that `multiprocessing` gives to a process whose fork server has died

Context = ForkServerContext | SpawnContext
FORK: Context = multiprocessing.get_context("forkserver")
NEW: Context = multiprocessing.get_context("spawn")
PRELOAD = "megarl.phases.preload"

Call = tuple[Callable[..., object], tuple[Any, ...]]  # what a process runs, such as `become_phase` with its arguments


class Processes:
    """The started processes of a phase on this node; ``index`` is an index into ``pids``."""

    def __init__(self, started: Sequence[BaseProcess], ends: Sequence[Path]) -> None:
        self._started, self._ends = started, ends
        self.pids = [process.pid or 0 for process in started]
        self._codes: dict[int, int] = {}

    def poll(self, seconds: float) -> dict[int, int]:
        """{index: exit code} of all processes that have ended; waits up to ``seconds`` for another one to end."""
        left = [index for index in range(len(self.pids)) if index not in self._codes]
        wait([self._started[index].sentinel for index in left], seconds)
        for index in left:
            if (code := self._started[index].exitcode) is not None:
                self._codes[index] = self._own_code(index) if code == NOT_REPORTED else code
        return self._codes

    def _own_code(self, index: int) -> int:
        """The exit code that a process has written, or that of a kill: the kernel kills the forks of a dead server."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[index], signal.SIGKILL)
        code: int | None = read_end(self._ends[index])["code"]
        return -signal.SIGKILL if code is None else code

    def terminate(self) -> None:
        for process in self._started:
            process.terminate()

    def kill(self) -> None:
        """Kill the processes, and their fork server, which may hang too."""
        for process in self._started:
            process.kill()
        kill_server()


def kill_server() -> None:
    """Kill this process's fork server, if there is one, which may not have named itself yet, and wait for its end."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, ChildProcessError):
            if child.name() == preload.SERVER_NAME or "multiprocessing.forkserver" in str(child.cmdline()):
                child.kill()
                os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # `multiprocessing` wants to hear of it too


class Starter:
    """Starts the processes of one phase after another on this node."""

    def __init__(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self._server_failed = False
        self._backend, self._trains = "", False  # of the recipe for which the fork server was started

    def prepare(self, recipe: Recipe, trains: bool = True) -> None:
        """Start the fork server, unless it runs; it imports what the recipe needs. trains: with what trainers need."""
        if self._server_failed:
            return
        if recipe.actor.backend != self._backend:
            if self._backend:  # forks of a server for CPUs see no GPUs
                kill_server()
            self._backend, self._trains = recipe.actor.backend, trains
        os.environ[preload.ORDER] = preload.order(recipe, self._trains)
        forkserver.set_forkserver_preload([PRELOAD])
        try:
            with kept_from_children():  # a Ctrl-C before it can ignore one
                forkserver.ensure_running()
        except OSError:  # such as a recipe too long for a variable
            self._server_failed = True
        finally:
            del os.environ[preload.ORDER]

    def start(self, calls: Sequence[Call], ends: Sequence[Path], recipe: Recipe, trains: bool, new: bool) -> Processes:
        """Start the processes of a phase.

        ends: the files to which they write how they end (`report_end`).
        new: as new interpreters, as they are on GPUs and without a fork server.
        """
        fork = not new and recipe.actor.backend == "cpu"
        return Processes((fork and self._fork(calls, recipe, trains)) or _start(NEW, calls), ends)

    def run(self, recipe: Recipe, trains: bool, call: Call) -> int | None:
        """Call a function in a fork; returns its exit code, None if the fork server failed or did not answer."""
        if not (forks := self._fork([call], recipe, trains)):
            return None
        code = None
        try:
            forks[0].join(recipe.run.stall_seconds)
            code = forks[0].exitcode
        finally:
            if code is None:
                kill_server()  # and with it the fork
        return None if code == NOT_REPORTED else code

    def _fork(self, calls: Sequence[Call], recipe: Recipe, trains: bool) -> list[BaseProcess]:
        """One fork of the fork server for each call; none if the server has failed in this run."""
        timer = threading.Timer(seconds := recipe.run.stall_seconds, kill_server)
        timer.start()
        try:
            self.prepare(recipe, trains)
            return [] if self._server_failed else _start(FORK, calls)
        except (OSError, EOFError):  # it was killed or hangs: a new interpreter works, or shows the error
            kill_server()  # and with it what it has started
            self._server_failed = True
            tell(f"the fork server failed, or did not answer for {seconds:g} s, so processes start without it")
            return []
        finally:
            timer.cancel()


def _start(context: Context, calls: Sequence[Call]) -> list[BaseProcess]:
    started: list[BaseProcess] = []
    try:
        for function, arguments in calls:
            process = context.Process(target=function, args=arguments)
            with kept_from_children() if context is NEW else contextlib.nullcontext():
                process.start()
            started.append(process)
    except BaseException:  # `multiprocessing` would wait for them at this process's exit
        for one in started:
            one.kill()
        raise
    return started


@dataclass(frozen=True)
class Ended:
    """How the processes of a phase ended on this node; processes are given by their index."""

    codes: dict[int, int]  # exit codes of all processes; -SIGKILL of those that had to be killed
    first: frozenset[int]  # processes that had failed before the others were asked to stop
    stopped: bool  # this agent received a stop signal
    stall: Stall | None = None  # the stall because of which all were killed
    aborted: bool = False  # they were killed because another node aborted the phase


def supervise(
    processes: Processes, stop_signals: Sequence[tuple[int, float]], watch: Watch, aborted: Callable[[], str]
) -> Ended:
    """Wait until all processes have ended. If one fails, or this agent gets a stop signal, the others get SIGTERM.

    If the watch finds a stalled process, or the phase failed on another node, all are killed: they could not save work.

    stop_signals: the list of (number, time) that `stop_signals_noted` fills.
    aborted: `Nodes.aborted`.

    A second Ctrl-C kills at once; a second SIGTERM does not, since Slurm sends another one at the time limit.
    """
    count = len(processes.pids)
    codes, stall, reason = processes.poll(0), None, ""
    while len(codes) < count and not (_failed(codes) or stop_signals or stall or reason):
        codes = processes.poll(POLL_SECONDS)
        stall, reason = watch.check(codes), aborted()
    if reason == STALLED:
        stall = stall or watch.stopped()  # the other node may only have waited for this one
    if stall or reason == STALLED:
        watch.dump(codes)
    kill_at = time.monotonic()
    if not stall and reason in ("", STOPPED):
        kill_at += float(os.environ.get("MEGARL_SHUTDOWN_SECONDS", SHUTDOWN_SECONDS))
        if _failed(codes):
            codes = processes.poll(POLL_SECONDS)  # others may have ended for the same reason
        elif stop_signals:
            tell("stopping")
        processes.terminate()
    first = frozenset(_failed(codes))
    while len(codes) < count:
        if time.monotonic() >= kill_at or _second_ctrl_c(stop_signals) or aborted() not in ("", STOPPED):
            processes.kill()
        codes = processes.poll(POLL_SECONDS)
    end_sessions(processes.pids)
    if stall or reason not in ("", STOPPED):
        first = frozenset(_failed(codes))
    return Ended(dict(codes), first, bool(stop_signals), stall, bool(reason))


def tell(message: str) -> None:
    """Say something on stderr, if somebody still reads it."""
    with contextlib.suppress(OSError):
        print(f"megarl: {message}", file=sys.stderr, flush=True)


def _second_ctrl_c(stop_signals: Sequence[tuple[int, float]]) -> bool:
    times = [at for number, at in stop_signals if number == signal.SIGINT]
    return bool(times) and times[-1] - times[0] > SECOND_CTRL_C_SECONDS


def _failed(codes: dict[int, int]) -> list[int]:
    return [index for index, code in codes.items() if code != 0]


def end_sessions(leaders: Collection[int]) -> None:
    """Kill what is left in the sessions of ended processes, ``leaders``, and wait until it is gone.

    The guard of an engine's server, which has a process group of its own, ends the server and itself. `PhaseFailed` if
    processes are left after `SESSION_SECONDS`.
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
    """Inside the context, `STOP_SIGNALS` only append to this list: (number, `time.monotonic`)."""
    received: list[tuple[int, float]] = []

    def note(number: int, _: object) -> None:
        received.append((number, time.monotonic()))

    before = [(number, signal.signal(number, note)) for number in STOP_SIGNALS]
    try:
        yield received
    finally:
        for number, handler in before:
            signal.signal(number, handler)
