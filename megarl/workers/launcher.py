"""Starts phases: a fresh set of processes on every node, under torch elastic's agents."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from megarl.errors import STOP_SIGNALS, STOPPED, PhaseFailed, UserError
from megarl.storage.files import INTACT
from megarl.storage.run_dir import RunDir
from megarl.workers.nodes import Nodes, Report

for name in ("", ".agent.server.api"):  # which has a level of its own
    logging.getLogger(f"torch.distributed.elastic{name}").setLevel(logging.CRITICAL)  # `_explain` says it better
NEARLY_FULL = 1 << 20  # bytes
NOT_FROM_PEERS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)  # no process dies of these because another one did
SHUTDOWN_SECONDS = 30  # what processes get between SIGTERM and SIGKILL; TORCH_ELASTIC_SHUTDOWN_TIMEOUT overrides


def run_phase(nodes: Nodes, run: RunDir, phase: str, stage: int, processes: int) -> None:
    """Run ``megarl.phases.<phase>`` for ``stage`` on all nodes, ``processes`` on each, and record it in events.jsonl.

    A phase that fails is started again up to ``run.max_restarts`` times, unless the failure is a `UserError` or a node
    is gone. Raises that `UserError`, `PhaseFailed`, or KeyboardInterrupt when a node was told to stop.
    """
    logs = run.logs / f"{stage:03d}_{phase}"
    shutil.rmtree(logs, ignore_errors=True)
    start = time.monotonic()
    run.log_event("phase_start", phase=phase, stage=stage, nodes=nodes.count, processes=processes)
    for attempt in itertools.count():
        attempt_logs = logs / f"attempt_{attempt}"
        attempt_logs.mkdir(parents=True)
        order = nodes.order(run=str(run.root), phase=phase, stage=stage, processes=processes, logs=str(attempt_logs))
        nodes.report(_run_here(nodes, run, phase, stage, processes, attempt_logs))
        reports = nodes.reports(order)
        seconds = round(time.monotonic() - start, 3)
        failure = _first_failure(reports.values())
        if failure is None:
            break
        if failure.outcome == "stopped":
            run.log_event("phase_stopped", phase=phase, stage=stage, seconds=seconds)
            raise KeyboardInterrupt
        if failure.mistake or nodes.dead or attempt == run.recipe.run.max_restarts:
            run.log_event("phase_failed", phase=phase, stage=stage, seconds=seconds)
            raise (UserError if failure.mistake else PhaseFailed)(failure.cause)
        cause = failure.cause.splitlines()[0]
        run.log_event("restart", phase=phase, stage=stage, attempt=attempt + 1, cause=cause)
    run.log_event("phase_end", phase=phase, stage=stage, seconds=seconds)


def follow(nodes: Nodes) -> None:
    """What the agents of all nodes but the first do: the leader's orders, until it has no more."""
    while True:
        try:
            order = nodes.next_order()
        except KeyboardInterrupt:
            nodes.report(Report("stopped", time=time.time()))
            raise
        if order.get("end"):
            return
        try:
            run = RunDir.open(Path(order["run"]))
        except UserError as error:
            cause = f"{nodes.name()}: {error}; the run directory must lie on a file system that all nodes share"
            nodes.report(Report("failed", cause, mistake=True, time=time.time()))
            continue
        report = _run_here(nodes, run, order["phase"], order["stage"], order["processes"], Path(order["logs"]))
        if nodes.leader_lost:
            raise nodes.lost_leader()
        nodes.report(report)


def _first_failure(reports: Iterable[Report]) -> Report | None:
    """What a person should know of: the first cause, before the failures that follow from it."""
    severity = {"failed": 0, "stopped": 1, "aborted": 2}
    bad = [report for report in reports if report.outcome != "done"]
    return min(bad, key=lambda r: (severity[r.outcome], not r.primary, r.time)) if bad else None


def _run_here(nodes: Nodes, run: RunDir, phase: str, stage: int, processes: int, logs: Path) -> Report:
    """One attempt at a phase on this node."""
    with tempfile.TemporaryDirectory(prefix="megarl-") as errors:
        return _run_agent(nodes, run, phase, stage, processes, _OneLogEach(logs, errors))


def _run_agent(nodes: Nodes, run: RunDir, phase: str, stage: int, processes: int, logs: _OneLogEach) -> Report:
    os.environ["MEGARL_AGENT_PID"] = str(os.getpid())
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"  # ranks follow from the node's, nothing to negotiate
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    spec = WorkerSpec(
        role=phase,
        local_world_size=processes,
        entrypoint=sys.executable,
        args=("-u", "-m", "megarl.phases", phase, str(run.root), str(stage)),
        rdzv_handler=_Meeting(nodes),
        max_restarts=0,  # all nodes restart together, see `run_phase`
        monitor_interval=0.1,
    )
    agent = LocalElasticAgent(
        spec,
        logs,
        exit_barrier_timeout=0.01,  # `Nodes.reports` waits for the others
        shutdown_timeout=int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)),
    )
    try:
        with _signals_restored(), nodes.killable(lambda: _kill(agent)):
            result = agent.run()
    except (SignalException, KeyboardInterrupt):
        return Report("stopped", time=time.time())
    return _report(result, nodes, run, phase, stage, Path(logs.root_log_dir))


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Elastic installs handlers of its own and leaves them."""
    ours = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)


def _kill(agent: LocalElasticAgent) -> None:
    """End this node's processes without a word; the agent then sees them fail."""
    for worker in agent.get_worker_group().workers:
        if worker.id:
            try:
                os.killpg(worker.id, signal.SIGKILL)  # each is the leader of a session of its own
            except ProcessLookupError:
                continue


class _Meeting(RendezvousHandler):
    """Everybody is there already: ranks and the store are those of the agents."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def next_rendezvous(self) -> RendezvousInfo:
        nodes = self._nodes
        address = RendezvousStoreInfo(nodes.address, nodes.port)
        return RendezvousInfo(nodes.phase_store(), nodes.rank, nodes.count, address)

    def get_backend(self) -> str:
        return "megarl"

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._nodes.phase_id

    def shutdown(self) -> bool:
        return True


class _OneLogEach(LogsSpecs):
    """``rank_0007.log`` has all that rank 7 printed. How it failed stands in a temporary file of this node: on a full
    disk torch could write only half of it beside the log, and not read that."""

    def __init__(self, logs: Path, errors: str) -> None:
        super().__init__(str(logs))
        self.errors = errors

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        names = {local: f"rank_{int(env['RANK']):04d}" for local, env in envs.items()}
        error_files = {local: f"{self.errors}/{name}.json" for local, name in names.items()}
        for local, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = error_files[local]
        return LogsDest(
            stdouts=dict.fromkeys(envs, os.devnull),  # the process sends it where its stderr goes
            stderrs={local: f"{self.root_log_dir}/{name}.log" for local, name in names.items()},
            error_files=error_files,
        )

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)


def _report(result: RunResult, nodes: Nodes, run: RunDir, phase: str, stage: int, logs: Path) -> Report:
    if not result.is_failed():
        return Report("done")
    failures = {rank: f for rank, f in result.failures.items() if f.exitcode not in (STOPPED, -signal.SIGTERM)}
    if not failures:
        return Report("stopped", time=time.time())  # the signal reached the processes before this agent
    if nodes.aborted() and all(failure.exitcode == -signal.SIGKILL for failure in failures.values()):
        return Report("aborted", "ended because of another node", time=time.time())
    rank, failure = min(failures.items(), key=lambda item: (not _primary(item[1]), _failed_at(item[1])))
    cause, mistake = _explain(rank, failure, run, logs / f"rank_{rank:04d}.log")
    if not mistake:
        where = f", {nodes.name()}" if nodes.count > 1 else ""
        cause = f"{phase} of stage {stage}, rank {rank}{where}: {cause}"
    return Report("failed", cause, mistake, _primary(failure), _failed_at(failure))


def _primary(failure: ProcessFailure) -> bool:
    return -failure.exitcode in NOT_FROM_PEERS


def _failed_at(failure: ProcessFailure) -> float:
    """Finer than torch's whole seconds, within which peers fail too."""
    try:
        return os.stat(failure.error_file).st_mtime
    except OSError:
        return float(failure.timestamp)


def _explain(rank: int, failure: ProcessFailure, run: RunDir, log: Path) -> tuple[str, bool]:
    """What a person needs of a failure, and whether it is a `UserError` in its own words; else cause, tail and log."""
    message: Any = failure.message["message"] if isinstance(failure.message, dict) else failure.message
    if isinstance(message, dict):
        message = message.get("message", str(message))
    if message.startswith("UserError: "):
        return message.removeprefix("UserError: "), True
    text = log.read_text(errors="replace") if log.exists() else ""
    # libraries wrap the error of a full disk, and on one not even the error file may fit
    known = failure.error_file not in ("", "<N/A>")
    full = shutil.disk_usage(run.root).free < NEARLY_FULL
    if os.strerror(errno.ENOSPC) in message + text or (full and not known):
        return _no_space_left(run, log), True
    cause = f"killed by signal {-failure.exitcode}" if failure.exitcode < 0 else message if known else "died"
    tail = "\n".join(text.splitlines()[-15:])
    return f"{cause}\n{tail}\nfull log: {log}", False


def _no_space_left(run: RunDir, log: Path) -> str:
    """The error does not say where; what failed may have given its space back by now."""
    places = filter(os.path.isdir, dict.fromkeys([str(run.root), tempfile.gettempdir(), "/dev/shm"]))
    free = ", ".join(f"{shutil.disk_usage(place).free / 1e6:.1f} MB in {place}" for place in places)
    return f"no space left on a device; free now: {free}. {INTACT}\nfull log: {log}"
