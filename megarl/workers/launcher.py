"""Runs phases: a fresh set of processes on every node, restarted together when one fails."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from megarl.distributed import PHASE_ID
from megarl.errors import STOPPED, PhaseFailed, UserError
from megarl.keystore import SECRET
from megarl.phases.entry import ERROR_FILE
from megarl.rollout import engine_module
from megarl.storage.files import INTACT
from megarl.storage.run_dir import RunDir, Stage
from megarl.workers.nodes import Nodes, Report
from megarl.workers.processes import Ended, Process, Processes, kill, stop_signals_noted, supervise

NEARLY_FULL = 1 << 20  # bytes
NEVER_SECONDARY = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)  # no process dies of these because another one did


def run_phase(nodes: Nodes, stage: Stage, phase: str, processes: int) -> None:
    """Run ``megarl.phases.<phase>`` for ``stage`` on all nodes, ``processes`` on each, and record it in events.jsonl.

    A phase that fails is started again up to ``run.max_restarts`` times, unless the failure is a `UserError` or a node
    is gone. Raises that `UserError`, `PhaseFailed`, or KeyboardInterrupt when a node was told to stop.
    """
    run = stage.run
    shutil.rmtree(_logs(stage, phase), ignore_errors=True)
    start = time.monotonic()
    stage.log_event("phase_start", phase=phase, nodes=nodes.count, processes=processes)
    for attempt in itertools.count():
        logs = _logs(stage, phase) / f"attempt_{attempt}"
        logs.mkdir(parents=True)
        order = nodes.order(phase=phase, processes=processes, stage=stage.number, attempt=attempt)
        nodes.report(_run_here(nodes, stage, phase, processes, logs))
        reports = nodes.reports(order)
        seconds = round(time.monotonic() - start, 3)
        failure = _first_failure(reports.values())
        if failure is None:
            break
        if failure.outcome == "stopped":
            stage.log_event("phase_stopped", phase=phase, seconds=seconds)
            raise KeyboardInterrupt
        if failure.mistake or nodes.dead or attempt == run.recipe.run.max_restarts:
            stage.log_event("phase_failed", phase=phase, seconds=seconds)
            raise (UserError if failure.mistake else PhaseFailed)(failure.cause)
        cause = failure.cause.splitlines()[0]
        stage.log_event("restart", phase=phase, attempt=attempt + 1, cause=cause)
    stage.log_event("phase_end", phase=phase, seconds=seconds)


def _logs(stage: Stage, phase: str) -> Path:
    return stage.run.logs / f"{stage.number:03d}_{phase}"


def follow(nodes: Nodes, run_dir: Path) -> None:
    """What the agents of all nodes but the first do: the leader's orders for the run, until it has no more."""
    while True:
        try:
            order = nodes.next_order()
        except KeyboardInterrupt:
            nodes.report(Report("stopped", time=time.time()))
            raise
        if order.get("end"):
            return
        try:
            run = RunDir.open(run_dir)
        except UserError as error:
            cause = f"{nodes.name()}: {error}; the run directory must lie on a file system that all nodes share"
            nodes.report(Report("failed", cause, mistake=True, time=time.time()))
            continue
        stage = run.stage(order["stage"])
        phase, logs = order["phase"], _logs(stage, order["phase"]) / f"attempt_{order['attempt']}"
        report = _run_here(nodes, stage, phase, order["processes"], logs)
        if nodes.leader_lost:
            raise nodes.lost_leader()
        nodes.report(report)


def _first_failure(reports: Iterable[Report]) -> Report | None:
    """What a person should know of: the first cause, before the failures that follow from it."""
    severity = {"failed": 0, "stopped": 1, "aborted": 2}
    bad = [report for report in reports if report.outcome != "done"]
    return min(bad, key=lambda r: (severity[r.outcome], not r.primary, r.time)) if bad else None


def _run_here(nodes: Nodes, stage: Stage, phase: str, processes: int, logs: Path) -> Report:
    """One attempt at a phase on this node."""
    # in a folder of its own: beside the logs there may be no space left to say so
    with tempfile.TemporaryDirectory(prefix="megarl-") as folder:
        with stop_signals_noted() as signals:  # from here on: one during the start is for the processes too
            started = start_here(nodes, stage, phase, processes, logs, Path(folder))
            with nodes.killable(lambda: kill(started)):
                ended = supervise(started, signals)
        failures = {rank: _failure(rank, logs, Path(folder)) for rank in _ranks(nodes, processes)}
        return _report(ended, nodes, stage, phase, failures)


def start_here(nodes: Nodes, stage: Stage, phase: str, processes: int, logs: Path, errors: Path) -> Processes:
    """Start this node's processes of a phase; what they print goes to ``logs``, how they failed to ``errors``."""
    specs = [
        Process(
            phase=phase,
            run=str(stage.run.root),
            stage=stage.number,
            log=str(_log(logs, rank)),
            environment=_environment(nodes, rank, processes) | {ERROR_FILE: str(_error_file(errors, rank))},
        )
        for rank in _ranks(nodes, processes)
    ]
    cold = phase not in ("rehearse", "optimize") and engine_module(stage.rollout.engine).COLD_START
    return nodes.starter.start(specs, cold)


def _ranks(nodes: Nodes, processes: int) -> range:
    """Node by node."""
    return range(nodes.rank * processes, (nodes.rank + 1) * processes)


def _environment(nodes: Nodes, rank: int, processes: int) -> dict[str, str]:
    """A process's place, in the variables that torch and the engines know."""
    values = {
        "RANK": rank,
        "WORLD_SIZE": nodes.count * processes,
        "LOCAL_RANK": rank % processes,
        "LOCAL_WORLD_SIZE": processes,
        "GROUP_RANK": nodes.rank,
        "GROUP_WORLD_SIZE": nodes.count,
        "MASTER_ADDR": nodes.address,
        "MASTER_PORT": nodes.port,
        PHASE_ID: nodes.phase_id,
        SECRET: nodes.secret.hex(),
    }
    return {name: str(value) for name, value in values.items()}


def _log(logs: Path, rank: int) -> Path:
    """For all that a rank prints."""
    return logs / f"rank_{rank:04d}.log"


def _error_file(errors: Path, rank: int) -> Path:
    return errors / f"rank_{rank:04d}.json"


@dataclass(frozen=True)
class Failure:
    """What a process that failed left behind. ``message`` is None where it could not say."""

    rank: int
    log: Path
    message: str | None = None
    mistake: bool = False
    time: float = field(default_factory=time.time)


def _failure(rank: int, logs: Path, errors: Path) -> Failure:
    try:
        return Failure(rank, _log(logs, rank), **json.loads(_error_file(errors, rank).read_text()))
    except (OSError, ValueError):  # killed, or written on a full disk
        return Failure(rank, _log(logs, rank))


def _report(ended: Ended, nodes: Nodes, stage: Stage, phase: str, failures: dict[int, Failure]) -> Report:
    if ended.stopped:  # also when the phase was just done: the run is to stop here
        return Report("stopped", time=time.time())
    ranks = list(failures)
    codes = {ranks[index]: ended.codes[index] for index in ended.first}
    codes = {rank: code for rank, code in codes.items() if code not in (STOPPED, -signal.SIGTERM)}
    if not any(ended.codes.values()):
        return Report("done")
    if not codes:  # a signal reached the processes alone
        return Report("stopped", time=time.time())
    if nodes.aborted() and all(code == -signal.SIGKILL for code in codes.values()):
        return Report("aborted", "ended because of another node", time=time.time())
    rank = min(codes, key=lambda rank: (not _primary(codes[rank]), failures[rank].time))
    failure, code = failures[rank], codes[rank]
    cause, mistake = _explain(failure, code, stage.run)
    if not mistake:
        where = f", {nodes.name()}" if nodes.count > 1 else ""
        cause = f"{phase} of stage {stage.number}, rank {rank}{where}: {cause}"
    return Report("failed", cause, mistake, _primary(code), failure.time)


def _primary(code: int) -> bool:
    return -code in NEVER_SECONDARY


def _explain(failure: Failure, code: int, run: RunDir) -> tuple[str, bool]:
    """What a person needs of a failure, and whether it is a `UserError` in its own words; else cause, tail and log."""
    if failure.mistake and failure.message is not None:
        return failure.message, True
    text = failure.log.read_text(errors="replace") if failure.log.exists() else ""
    # libraries wrap the error of a full disk, some until nothing of it is left (torch: "unexpected pos 704 vs 598")
    full = shutil.disk_usage(run.root).free < NEARLY_FULL
    if os.strerror(errno.ENOSPC) in (failure.message or "") + text or full:
        return _no_space_left(run, failure.log), True
    cause = f"killed by signal {-code}" if code < 0 else failure.message or "died"
    if code == -signal.SIGKILL:
        cause += ", most often because the machine or the job ran out of memory (`dmesg`, or Slurm's accounting, says)"
    tail = "\n".join(text.splitlines()[-15:])
    return f"{cause}\n{tail}\nfull log: {failure.log}", False


def _no_space_left(run: RunDir, log: Path) -> str:
    """The error does not say where; what failed may have given its space back by now."""
    places = filter(os.path.isdir, dict.fromkeys([str(run.root), tempfile.gettempdir(), "/dev/shm"]))
    free = ", ".join(f"{shutil.disk_usage(place).free / 1e6:.1f} MB in {place}" for place in places)
    return f"no space left on a device; free now: {free}. {INTACT}\nfull log: {log}"
