"""Runs phases: each with a fresh set of processes on every node, which are all restarted together when one fails."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.distributed import PATIENCE, STORE
from megarl.errors import STOPPED, PhaseFailed, UserError
from megarl.heartbeats import FILE
from megarl.phases import PHASES
from megarl.phases.entry import become_phase, read_end
from megarl.rollout import engine_module
from megarl.storage.files import APPEAR_SECONDS, INTACT
from megarl.storage.run_dir import RunDir, Stage
from megarl.workers.nodes import Nodes, Report
from megarl.workers.processes import POLL_SECONDS, Call, Ended, Processes, stop_signals_noted, supervise, tell
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
        logs.mkdir(parents=True, exist_ok=True)  # NFS keeps files that somebody reads
        begun = {"stage": stage.number, "phase": phase, "processes": processes, "attempt": attempt}
        nodes.begin(begun | {"events": run.events.stat().st_size})
        nodes.report(_run_here(nodes, stage, phase, processes, logs))
        reports = nodes.reports()
        seconds = round(time.monotonic() - start, 3)
        failure = _first_failure(reports)
        if failure is None:
            break
        for rank, report in reports.items():
            if report.stalled and rank:  # this node's is an event since it was found
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
    """Make the attempts at phases that the first agent begins, until it ends the run; for the agents of other nodes.

    Raises as `Nodes.check_end`.
    """
    while (start := nodes.meet()) is not None:
        try:
            _wait_for(run_dir / "events.jsonl", start["events"])
            stage, phase = RunDir.open(run_dir).stage(start["stage"]), start["phase"]
        except (UserError, OSError, ValueError) as error:
            cause = f"{nodes.name()}: {error}; the run directory must lie on a file system that all nodes share"
            nodes.report(Report("failed", cause, mistake=True, time=time.time()))
        else:
            nodes.report(_run_here(nodes, stage, phase, start["processes"], _logs(stage, phase, start["attempt"])))
    nodes.check_end()


def _wait_for(events: Path, size: int) -> None:
    """Wait until this node sees what the first one has written before this phase; `UserError` after a while."""
    deadline = time.monotonic() + APPEAR_SECONDS
    while not events.exists() or len(events.read_bytes()) < size:  # read: its size alone may be remembered
        if time.monotonic() > deadline:
            raise UserError(f"{events} lacks what node 0 wrote {APPEAR_SECONDS:.0f} s ago")
        time.sleep(POLL_SECONDS)


def _first_failure(reports: Mapping[int, Report]) -> Report | None:
    """The failure that most likely caused all others, after a stall with all heartbeats; None if all nodes are done.

    Among those that could be a consequence a mistake comes first, since clocks of nodes differ.
    """
    bad = [report for report in reports.values() if report.outcome != "done"]
    if not bad:
        return None
    order = ("failed", "stopped", "aborted")
    first = min(bad, key=lambda r: (order.index(r.outcome), not r.primary, not r.mistake, r.time))
    seen = [report.last_seen for report in reports.values() if first.stalled and report.last_seen]
    return replace(first, cause="\n".join([first.cause, *seen]))


def _run_here(nodes: Nodes, stage: Stage, phase: str, processes: int, logs: Path) -> Report:
    """Make one attempt at a phase on this node."""

    def warn(message: str) -> None:
        if nodes.rank:
            tell(f"{nodes.name()}: {message}")
        else:
            stage.log_event("no_progress", phase=phase, cause=message)

    with tempfile.TemporaryDirectory(prefix="megarl-") as folder:
        here = Here(nodes, stage, phase, processes, logs, Path(folder))
        with stop_signals_noted() as signals:  # before the start, so that a signal during it stops the processes too
            started = here.start()
            watch = here.watch(started, warn)
            ended = supervise(started, signals, watch, nodes.aborted)
        return replace(here.report(ended), last_seen="\n".join(map(str, watch.watched)))


@dataclass(frozen=True)
class Here:
    """One attempt at a phase on this node."""

    nodes: Nodes
    stage: Stage
    phase: str
    processes: int  # on each node
    logs: Path
    folder: Path  # for ends and heartbeats, since the disk with the logs may be full

    @property
    def ranks(self) -> range:
        """The ranks of this node's processes; ranks are assigned node by node."""
        return range(self.nodes.rank * self.processes, (self.nodes.rank + 1) * self.processes)

    def log(self, rank: int) -> Path:
        """The file for stdout and stderr of a rank."""
        return self.logs / f"rank_{rank:04d}.log"

    def file(self, rank: int, kind: str) -> Path:
        """The file for a rank's heartbeats (``beats``), or for how it ended (``end``)."""
        return self.folder / f"rank_{rank:04d}.{kind}"

    def watch(self, started: Processes, warn: Callable[[str], None]) -> Watch:
        pids = zip(self.ranks, started.pids, strict=True)
        watched = [Watched(rank, pid, self.file(rank, "beats"), self.log(rank)) for rank, pid in pids]
        return Watch(watched, self.stage.run.recipe.run.stall_seconds, self.nodes.count == 1, warn)

    def start(self) -> Processes:
        run, of_phase, ends = self.stage.run, PHASES[self.phase], [self.file(rank, "end") for rank in self.ranks]
        calls: list[Call] = []
        for rank, end in zip(self.ranks, ends, strict=True):
            variables = {  # those of torch and the engines that tell its rank, and megarl's
                "RANK": rank,
                "WORLD_SIZE": self.nodes.count * self.processes,
                "LOCAL_RANK": rank % self.processes,
                "LOCAL_WORLD_SIZE": self.processes,
                "GROUP_RANK": self.nodes.rank,
                "GROUP_WORLD_SIZE": self.nodes.count,
                FILE: self.file(rank, "beats"),
                PATIENCE: 2 * run.recipe.run.stall_seconds,
                STORE: self.nodes.phase_store or self.folder / "store",
            }
            environment = dict(os.environ) | {name: str(value) for name, value in variables.items()}
            arguments = (self.phase, run.root, self.stage.number, self.log(rank), environment, end)
            calls.append((become_phase, arguments))
        new = of_phase.engine and engine_module(self.stage.rollout.engine).NEW_INTERPRETER
        return self.nodes.starter.start(calls, ends, run.recipe, of_phase.actor, new)

    def report(self, ended: Ended) -> Report:
        ends = {rank: read_end(self.file(rank, "end")) for rank in self.ranks}
        if ended.stopped:  # even if all processes are done: the run must not go on to the next phase
            lost = [rank for rank, end in ends.items() if end["code"] not in (0, STOPPED)]
            if lost and PHASES[self.phase].updates:
                why = ends[lost[0]]["message"] or "it was killed; MEGARL_SHUTDOWN_SECONDS gives it more time"
                tell(f"rank {lost[0]} may not have saved its updates since the last checkpoint: {why}")
            return Report("stopped", time=time.time())
        where = f", {self.nodes.name()}" if self.nodes.count > 1 else ""
        if ended.stall is not None:
            cause = f"{self.phase} of stage {self.stage.number}{where}: {ended.stall.text}"
            return Report("failed", cause, primary=ended.stall.certain, stalled=True, time=ended.stall.time)
        codes = {self.ranks[index]: ended.codes[index] for index in ended.first}
        codes = {rank: code for rank, code in codes.items() if code not in (STOPPED, -signal.SIGTERM)}
        if not any(ended.codes.values()):
            return Report("done")
        if not codes:  # a stop signal reached the processes, but not this agent
            return Report("stopped", time=time.time())
        if ended.aborted and all(-code in (signal.SIGKILL, signal.SIGUSR1) for code in codes.values()):
            return Report("aborted", "killed because another node failed", time=time.time())
        rank = min(codes, key=lambda rank: (-codes[rank] not in PRIMARY_SIGNALS, ends[rank]["time"]))
        said, code = ends[rank], codes[rank]
        if said["mistake"]:
            return Report("failed", said["message"], mistake=True, time=said["time"])
        log, run = self.log(rank), self.stage.run.root
        text = log.read_text(errors="replace") if log.exists() else ""
        cause = f"killed by signal {-code}" if code < 0 else said["message"] or f"ended with exit code {code}"
        if code == -signal.SIGKILL:
            cause += ", most often because the machine or the job ran out of memory (see `dmesg` or Slurm's accounting)"
        tail = "\n".join(text.splitlines()[-15:])
        cause = f"{self.phase} of stage {self.stage.number}, rank {rank}{where}: {cause}\nfull log: {log}\n{tail}"
        # some libraries hide the error of a full disk behind one of their own (torch: "unexpected pos 704 vs 598")
        said_full = os.strerror(errno.ENOSPC) in said["message"] + text[-10_000:]
        if full := said_full or shutil.disk_usage(run).free < NEARLY_FULL:
            # the error does not name the place, and the process may have freed its space by now
            places = filter(os.path.isdir, [str(run), tempfile.gettempdir(), "/dev/shm"])
            free = ", ".join(f"{shutil.disk_usage(place).free / 1e6:.1f} MB in {place}" for place in places)
            cause = f"no space left on a device; free now: {free}. {INTACT}\n{cause}"
        return Report("failed", cause, full, -code in PRIMARY_SIGNALS, said["time"])
