"""Runs phases: each with a fresh set of processes on every node, which are all restarted together when one fails."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megarl.distributed import PATIENCE, STORE
from megarl.errors import STOPPED, PhaseFailed, UserError
from megarl.heartbeats import FILE
from megarl.phases import PHASES
from megarl.phases.entry import ERROR_FILE, become_phase
from megarl.rollout import engine_module
from megarl.storage.checked_json import read_intact_lines
from megarl.storage.files import APPEAR_SECONDS, INTACT
from megarl.storage.run_dir import RunDir, Stage
from megarl.workers.nodes import Nodes, Report
from megarl.workers.processes import POLL_SECONDS, Call, Ended, Processes, stop_signals_noted, supervise
from megarl.workers.watch import Watch, Watched

NEARLY_FULL = 1 << 20  # bytes; with less free space a failure is blamed on the full disk
PRIMARY_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)  # no process dies of these because another one died


def run_phase(nodes: Nodes, stage: Stage, phase: str, processes: int) -> None:
    """Run ``megarl.phases.<phase>`` for ``stage`` on all nodes, ``processes`` on each, and record it in events.jsonl.

    A phase that fails is started again up to ``run.max_restarts`` times, unless the failure is a `UserError` or a node
    is gone. Raises that `UserError`, `PhaseFailed`, or KeyboardInterrupt when a node was told to stop.
    """
    run = stage.run
    shutil.rmtree(_logs(stage, phase, 0).parent, ignore_errors=True)
    start = time.monotonic()
    stage.log_event("phase_start", phase=phase, nodes=nodes.count, processes=processes)
    for attempt in itertools.count():
        logs = _logs(stage, phase, attempt)
        logs.mkdir(parents=True)
        nodes.begin(_last_start(run.events) | {"attempt": attempt} if nodes.count > 1 else {})
        nodes.report(_run_here(nodes, stage, phase, processes, logs))
        reports = nodes.reports()
        seconds = round(time.monotonic() - start, 3)
        failure = _first_failure(reports)
        if failure is None:
            break
        for rank, report in reports.items():
            if report.stalled and rank:  # this node's own stall is logged already
                stage.log_event("no_progress", phase=phase, cause=report.cause.splitlines()[0])
        if failure.outcome == "stopped":
            stage.log_event("phase_stopped", phase=phase, seconds=seconds)
            raise KeyboardInterrupt
        if failure.mistake or nodes.dead or attempt == run.recipe.run.max_restarts:
            stage.log_event("phase_failed", phase=phase, seconds=seconds)
            raise (UserError if failure.mistake else PhaseFailed)(failure.cause)
        cause = failure.cause.splitlines()[0]
        stage.log_event("restart", phase=phase, attempt=attempt + 1, cause=cause)
    stage.log_event("phase_end", phase=phase, seconds=seconds)


def _logs(stage: Stage, phase: str, attempt: int) -> Path:
    return stage.run.logs / f"{stage.number:03d}_{phase}/attempt_{attempt}"


def follow(nodes: Nodes, run_dir: Path) -> None:
    """Make the attempts at phases that the first agent begins, until it ends the run; for the agents of other nodes."""
    while (start := nodes.meet()) is not None:
        attempt = start.pop("attempt")
        try:
            _wait_for(start, run_dir / "events.jsonl")
            run = RunDir.open(run_dir)
        except (UserError, OSError, ValueError) as error:
            cause = f"{nodes.name()}: {error}; the run directory must lie on a file system that all nodes share"
            nodes.report(Report("failed", cause, mistake=True, time=time.time()))
        else:
            stage, phase = run.stage(start["stage"]), start["phase"]
            nodes.report(_run_here(nodes, stage, phase, start["processes"], _logs(stage, phase, attempt)))


def _last_start(events: Path) -> dict[str, Any]:
    """The last ``phase_start`` in events.jsonl; {} if there is none."""
    try:
        found = read_intact_lines(events)[0]
    except FileNotFoundError:
        return {}
    return next((event for event in reversed(found) if event.get("event") == "phase_start"), {})


def _wait_for(start: dict[str, Any], events: Path) -> None:
    """Wait until this node sees that the first one has begun this phase; `UserError` after `APPEAR_SECONDS`."""
    deadline = time.monotonic() + APPEAR_SECONDS
    while _last_start(events) != start:
        if time.monotonic() > deadline:
            raise UserError(f"{events} lacks the {start['phase']} that node 0 began {APPEAR_SECONDS:.0f} s ago")
        time.sleep(POLL_SECONDS)


def _first_failure(reports: Mapping[int, Report]) -> Report | None:
    """The failure that most likely caused all others, to be shown to the user; None if all nodes are done.

    reports: {node: report}. After a stall the message also has the last heartbeats of the other nodes' processes.
    """
    severity = {"failed": 0, "stopped": 1, "aborted": 2}
    bad = [report for report in reports.values() if report.outcome != "done"]
    if not bad:
        return None
    first = min(bad, key=lambda r: (severity[r.outcome], not r.primary, r.time))
    if not first.stalled:
        return first
    others = [report.last_seen for report in reports.values() if report is not first and report.last_seen]
    return replace(first, cause="\n".join([first.cause, *others]))


def _run_here(nodes: Nodes, stage: Stage, phase: str, processes: int, logs: Path) -> Report:
    """Make one attempt at a phase on this node."""

    def warn(message: str) -> None:
        if nodes.rank == 0:  # which alone writes events, and has the other nodes' stalls from their reports
            stage.log_event("no_progress", phase=phase, cause=message)
        else:
            print(f"megarl: {nodes.name()}: {message}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="megarl-") as folder:
        here = Here(nodes, stage, phase, processes, logs, Path(folder))
        with stop_signals_noted() as signals:  # before the start, so that a signal during it stops the processes too
            started = here.start()
            watch = here.watch(started, warn)
            if nodes.starter.complaint:
                warn(nodes.starter.complaint)
                nodes.starter.complaint = ""
            ended = supervise(started, signals, watch, nodes.aborted, PHASES[phase].saves)
        return replace(here.report(ended), last_seen="\n".join(watch.describe()))


@dataclass(frozen=True)
class Here:
    """One attempt at a phase on this node.

    processes: number of them on each node. logs: the folder for their output. folder: for errors and heartbeats, since
    the disk with the logs may be full.
    """

    nodes: Nodes
    stage: Stage
    phase: str
    processes: int
    logs: Path
    folder: Path

    @property
    def ranks(self) -> range:
        """The ranks of this node's processes; ranks are assigned node by node."""
        return range(self.nodes.rank * self.processes, (self.nodes.rank + 1) * self.processes)

    def log(self, rank: int) -> Path:
        """The file for stdout and stderr of a rank."""
        return self.logs / f"rank_{rank:04d}.log"

    def file(self, rank: int, kind: str) -> Path:
        """The file for a rank's ``error``, its heartbeats (``beats``) or its exit code (``end``)."""
        return self.folder / f"rank_{rank:04d}.{kind}"

    def watch(self, started: Processes, warn: Callable[[str], None]) -> Watch:
        pids = zip(self.ranks, started.pids, strict=True)
        watched = [Watched(rank, pid, self.file(rank, "beats"), self.log(rank)) for rank, pid in pids]
        return Watch(watched, self.stage.run.recipe.run.stall_seconds, self.nodes.count == 1, warn)

    def start(self) -> Processes:
        """Start this node's processes of the phase."""
        run, ends = self.stage.run, [self.file(rank, "end") for rank in self.ranks]
        calls: list[Call] = []
        for rank, end in zip(self.ranks, ends, strict=True):
            environment = dict(os.environ) | {name: str(value) for name, value in self._variables(rank).items()}
            arguments = (self.phase, str(run.root), self.stage.number, str(self.log(rank)), environment, str(end))
            calls.append((become_phase, arguments))
        of_phase = PHASES[self.phase]
        new = of_phase.engine and engine_module(self.stage.rollout.engine).NEW_INTERPRETER
        return self.nodes.starter.start(calls, ends, run.recipe, of_phase.actor, new)

    def _variables(self, rank: int) -> dict[str, object]:
        """Environment variables of a process: those of torch and the engines that tell its rank, and megarl's."""
        return {
            "RANK": rank,
            "WORLD_SIZE": self.nodes.count * self.processes,
            "LOCAL_RANK": rank % self.processes,
            "LOCAL_WORLD_SIZE": self.processes,
            "GROUP_RANK": self.nodes.rank,
            "GROUP_WORLD_SIZE": self.nodes.count,
            ERROR_FILE: self.file(rank, "error"),
            FILE: self.file(rank, "beats"),
            PATIENCE: 2 * self.stage.run.recipe.run.stall_seconds,
            STORE: self.nodes.phase_store or self.folder / "store",
        }

    def report(self, ended: Ended) -> Report:
        """How the attempt ended."""
        if ended.stopped:  # even if all processes are done: the run must not go on to the next phase
            return Report("stopped", time=time.time())
        where = f", {self.nodes.name()}" if self.nodes.count > 1 else ""
        if ended.stall is not None:
            cause = f"{self.phase} of stage {self.stage.number}{where}: {ended.stall.text}"
            return Report("failed", cause, primary=ended.stall.certain, stalled=True, time=time.time())
        codes = {self.ranks[index]: ended.codes[index] for index in ended.first}
        codes = {rank: code for rank, code in codes.items() if code not in (STOPPED, -signal.SIGTERM)}
        if not any(ended.codes.values()):
            return Report("done")
        if not codes:  # a stop signal reached the processes, but not this agent
            return Report("stopped", time=time.time())
        if ended.aborted and all(-code in (signal.SIGKILL, signal.SIGUSR1) for code in codes.values()):
            return Report("aborted", "killed because another node failed", time=time.time())
        failures = {rank: self._failure(rank) for rank in codes}
        rank = min(codes, key=lambda rank: (not _primary(codes[rank]), failures[rank].time))
        failure, code = failures[rank], codes[rank]
        cause, mistake = _explain(failure, code, self.stage.run)
        if not mistake:
            cause = f"{self.phase} of stage {self.stage.number}, rank {rank}{where}: {cause}"
        return Report("failed", cause, mistake, _primary(code), failure.time)

    def _failure(self, rank: int) -> Failure:
        try:
            return Failure(self.log(rank), **json.loads(self.file(rank, "error").read_text()))
        except (OSError, ValueError):  # killed, or written on a full disk
            return Failure(self.log(rank))


@dataclass(frozen=True)
class Failure:
    """What a failed process left behind in its error file."""

    log: Path
    message: str | None = None  # None if it was killed or could not write the file
    mistake: bool = False  # the error is a `UserError`
    time: float = field(default_factory=time.time)


def _primary(code: int) -> bool:
    return -code in PRIMARY_SIGNALS


def _explain(failure: Failure, code: int, run: RunDir) -> tuple[str, bool]:
    """(message for the user, whether the failure is a `UserError`).

    The message of a `UserError` is its own text; of any other failure it is the cause, the end of the log and its path.
    """
    if failure.mistake and failure.message is not None:
        return failure.message, True
    text = failure.log.read_text(errors="replace") if failure.log.exists() else ""
    # some libraries hide the error of a full disk behind one of their own (torch: "unexpected pos 704 vs 598")
    full = shutil.disk_usage(run.root).free < NEARLY_FULL
    if os.strerror(errno.ENOSPC) in (failure.message or "") + text or full:
        return _no_space_left(run, failure.log), True
    cause = f"killed by signal {-code}" if code < 0 else failure.message or f"ended with exit code {code}"
    if code == -signal.SIGKILL:
        cause += ", most often because the machine or the job ran out of memory (see `dmesg` or Slurm's accounting)"
    tail = "\n".join(text.splitlines()[-15:])
    return f"{cause}\n{tail}\nfull log: {failure.log}", False


def _no_space_left(run: RunDir, log: Path) -> str:
    """Message with the free space of every place that may be full: the error does not name the place.

    The failed process may have freed its space by now.
    """
    places = filter(os.path.isdir, dict.fromkeys([str(run.root), tempfile.gettempdir(), "/dev/shm"]))
    free = ", ".join(f"{shutil.disk_usage(place).free / 1e6:.1f} MB in {place}" for place in places)
    return f"no space left on a device; free now: {free}. {INTACT}\nfull log: {log}"
