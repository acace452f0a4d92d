"""Runs phases: each with a fresh set of processes on every node, which are all restarted together when one fails."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from megarl.distributed import PATIENCE, STORE
from megarl.errors import STOPPED, PhaseFailed, UserError
from megarl.heartbeats import FILE
from megarl.phases import PHASES
from megarl.phases.entry import ERROR_FILE
from megarl.rollout import engine_module
from megarl.storage.checked_json import read_intact_lines
from megarl.storage.files import INTACT
from megarl.storage.run_dir import RunDir, Stage
from megarl.workers.nodes import Nodes, Report
from megarl.workers.processes import Ended, Process, Processes, stop_signals_noted, supervise
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
        nodes.begin()
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
    while nodes.meet():
        try:
            stage, phase, processes, logs = _begun(RunDir.open(run_dir))
        except (UserError, OSError, ValueError) as error:
            cause = f"{nodes.name()}: {error}; the run directory must lie on a file system that all nodes share"
            nodes.report(Report("failed", cause, mistake=True, time=time.time()))
        else:
            nodes.report(_run_here(nodes, stage, phase, processes, logs))


def _begun(run: RunDir) -> tuple[Stage, str, int, Path]:
    """The attempt that was begun last, as events.jsonl has it: stage, phase, processes on each node, folder of logs."""
    events = read_intact_lines(run.events)[0]
    index = max(index for index, event in enumerate(events) if event["event"] == "phase_start")
    start, attempt = events[index], sum(event["event"] == "restart" for event in events[index:])
    stage, phase = run.stage(start["stage"]), start["phase"]
    return stage, phase, start["processes"], _logs(stage, phase, attempt)


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
    # error files go to a folder of their own, because the disk with the logs may be full
    with tempfile.TemporaryDirectory(prefix="megarl-") as folder:
        with stop_signals_noted() as signals:  # before the start, so that a signal during it stops the processes too
            watch = _watch(nodes, stage, phase, processes, logs, Path(folder))
            started = start_here(nodes, stage, phase, processes, logs, Path(folder))
            if (cause := nodes.starter.complaint) and nodes.rank == 0:
                nodes.starter.complaint = ""
                stage.log_event("no_progress", phase=phase, cause=cause)
            ended = supervise(started, signals, watch, nodes.aborted, PHASES[phase].saves)
        failures = {rank: _failure(rank, logs, Path(folder)) for rank in _ranks(nodes, processes)}
        report = _report(ended, nodes, stage, phase, failures)
        return replace(report, last_seen="\n".join(watch.describe(started.pids)))


def _watch(nodes: Nodes, stage: Stage, phase: str, processes: int, logs: Path, folder: Path) -> Watch:
    def warn(message: str) -> None:
        if nodes.rank == 0:  # only the leader writes events; it logs the other nodes' stalls from their reports
            stage.log_event("no_progress", phase=phase, cause=message)

    watched = [Watched(rank, _beats_file(folder, rank), _log(logs, rank)) for rank in _ranks(nodes, processes)]
    cuda = stage.run.recipe.actor.backend == "cuda"
    nccl = (_nccl_pipe(folder), _nccl_dump(logs)) if cuda else None
    return Watch(watched, stage.run.recipe.run.stall_seconds, nodes.count == 1, warn, nccl)


def start_here(nodes: Nodes, stage: Stage, phase: str, processes: int, logs: Path, errors: Path) -> Processes:
    """Start this node's processes of a phase: output goes to files in ``logs``, errors and heartbeats to ``errors``."""
    seconds = stage.run.recipe.run.stall_seconds
    specs = [
        Process(
            phase=phase,
            run=str(stage.run.root),
            stage=stage.number,
            log=str(_log(logs, rank)),
            environment=dict(os.environ)
            | _environment(nodes, rank, processes)
            | {ERROR_FILE: str(_error_file(errors, rank)), FILE: str(_beats_file(errors, rank))}
            | {PATIENCE: str(2 * seconds), STORE: nodes.phase_store or str(errors / "store")}
            | (_flight_recorder(logs, errors) if _trains_on_gpus(stage, phase, rank % processes) else {}),
            end=str(errors / f"rank_{rank:04d}.end"),
        )
        for rank in _ranks(nodes, processes)
    ]
    new = PHASES[phase].engine and engine_module(stage.rollout.engine).NEW_INTERPRETER
    return nodes.starter.start(specs, stage.run.recipe, new)


def _ranks(nodes: Nodes, processes: int) -> range:
    """The ranks of this node's processes; ranks are assigned node by node."""
    return range(nodes.rank * processes, (nodes.rank + 1) * processes)


def _environment(nodes: Nodes, rank: int, processes: int) -> dict[str, str]:
    """The environment variables of torch and the engines that tell a process its rank."""
    values = {
        "RANK": rank,
        "WORLD_SIZE": nodes.count * processes,
        "LOCAL_RANK": rank % processes,
        "LOCAL_WORLD_SIZE": processes,
        "GROUP_RANK": nodes.rank,
        "GROUP_WORLD_SIZE": nodes.count,
    }
    return {name: str(value) for name, value in values.items()}


def _log(logs: Path, rank: int) -> Path:
    """The file for stdout and stderr of a rank."""
    return logs / f"rank_{rank:04d}.log"


def _error_file(errors: Path, rank: int) -> Path:
    return errors / f"rank_{rank:04d}.json"


def _beats_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:04d}.beats"


def _nccl_pipe(folder: Path) -> Path:
    """Prefix of the flight recorder's pipes, to which torch adds the rank and ".pipe"."""
    return folder / "nccl_"


def _nccl_dump(logs: Path) -> Path:
    """Prefix of the flight recorder's dumps, to which torch adds the rank."""
    return logs / "nccl_rank_"


def _trains_on_gpus(stage: Stage, phase: str, local_rank: int) -> bool:
    actor = stage.run.recipe.actor
    return PHASES[phase].actor and local_rank < actor.processes_per_node and actor.backend == "cuda"


def _flight_recorder(logs: Path, folder: Path) -> dict[str, str]:
    """Variables of torch's flight recorder, which records NCCL's last collectives and dumps them on demand or failure.

    Names are those of torch 2.11 to 2.13; where two mean the same, the first is the newer one. Variables that the user
    has set are left out, so that they keep their values.
    """
    values = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(_nccl_dump(logs)),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(_nccl_dump(logs)),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(_nccl_pipe(folder)),
    }
    return {name: value for name, value in values.items() if name not in os.environ}


@dataclass(frozen=True)
class Failure:
    """What a failed process left behind in its error file."""

    log: Path
    message: str | None = None  # None if it was killed or could not write the file
    mistake: bool = False  # the error is a `UserError`
    time: float = field(default_factory=time.time)


def _failure(rank: int, logs: Path, errors: Path) -> Failure:
    try:
        return Failure(_log(logs, rank), **json.loads(_error_file(errors, rank).read_text()))
    except (OSError, ValueError):  # killed, or written on a full disk
        return Failure(_log(logs, rank))


def _report(ended: Ended, nodes: Nodes, stage: Stage, phase: str, failures: dict[int, Failure]) -> Report:
    if ended.stopped:  # even if all processes are done: the run must not go on to the next phase
        return Report("stopped", time=time.time())
    if ended.stall is not None:
        cause = f"{phase} of stage {stage.number}{_on(nodes)}: {ended.stall.text}"
        return Report("failed", cause, primary=ended.stall.certain, stalled=True, time=time.time())
    ranks = list(failures)
    codes = {ranks[index]: ended.codes[index] for index in ended.first}
    codes = {rank: code for rank, code in codes.items() if code not in (STOPPED, -signal.SIGTERM)}
    if not any(ended.codes.values()):
        return Report("done")
    if not codes:  # a stop signal reached the processes, but not this agent
        return Report("stopped", time=time.time())
    if nodes.aborted() and all(code == -signal.SIGKILL for code in codes.values()):
        return Report("aborted", "killed because another node failed", time=time.time())
    rank = min(codes, key=lambda rank: (not _primary(codes[rank]), failures[rank].time))
    failure, code = failures[rank], codes[rank]
    cause, mistake = _explain(failure, code, stage.run)
    if not mistake:
        cause = f"{phase} of stage {stage.number}, rank {rank}{_on(nodes)}: {cause}"
    return Report("failed", cause, mistake, _primary(code), failure.time)


def _on(nodes: Nodes) -> str:
    return f", {nodes.name()}" if nodes.count > 1 else ""


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
