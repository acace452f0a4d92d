"""The worker processes of a sweep, each of which makes one run after another.

Workers are forks of the sweep's process, each in a session of its own. A worker makes its runs as `megarl train` and
`megarl optimize` do, and uses one fork server for all of them. No worker outlives the sweep.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Literal

from megarl.commands.one_phase import optimize_branch
from megarl.commands.sweep.plan import Job
from megarl.commands.train import optimizes, train
from megarl.errors import Busy, PhaseFailed, UserError
from megarl.linux import die_with_parent
from megarl.storage.files import make_directory
from megarl.storage.run_dir import RunDir
from megarl.workers.node_rank import NodeRank
from megarl.workers.nodes import Nodes
from megarl.workers.preflight import check

POLL_SECONDS = 2.0  # how often to look whether rollouts that another sweep generates are ready

Kind = Literal["done", "busy", "mistake", "failed", "stopped"]


@dataclass(frozen=True)
class JobOutcome:
    """The result of an order to a worker."""

    kind: Kind  # "busy": another process works on the run; "mistake": a `UserError`; "stopped": interrupted
    cause: str = ""
    seconds: float = 0.0


@dataclass
class Worker:
    """A worker process as the sweep sees it; ``job`` is what it works on, None if it is idle."""

    process: ForkProcess
    connection: Connection
    job: Job | None = None


@dataclass
class Workers:
    """A pool of worker processes; leaving the context stops them."""

    number: int  # of workers at most
    logs: Path  # the directory for what the runs print
    _workers: list[Worker] = field(default_factory=list)

    def __enter__(self) -> Workers:
        make_directory(self.logs)
        return self

    def __exit__(self, *_: object) -> None:
        """Ask workers that are busy to save and stop, as Ctrl-C does, and wait for all."""
        for worker in self._workers:
            if worker.job is not None:
                worker.process.terminate()
            worker.connection.close()  # no more orders
        for worker in self._workers:
            worker.process.join()

    def check(self, jobs: list[Job]) -> Iterator[tuple[Job, JobOutcome]]:
        """Make for each run the checks that a run begins with, and yield their outcomes."""
        return self._process(_check, jobs, lambda job: True)

    def make(self, jobs: list[Job]) -> Iterator[tuple[Job, JobOutcome]]:
        """Make or continue runs, each once the rollouts that it needs exist, and yield their outcomes."""
        return self._process(_make, jobs, Job.is_possible)

    def _process(
        self, order: Callable[[Nodes, Job], None], jobs: list[Job], is_possible: Callable[[Job], bool]
    ) -> Iterator[tuple[Job, JobOutcome]]:
        """Give ``order`` for every job to the workers and yield each job's outcome when it ends.

        Jobs that are still not possible when all others have ended are left out.
        """
        waiting, elsewhere = list(jobs), list[Job]()
        while True:
            for worker in self._idle(len(waiting)):
                if (job := next(filter(is_possible, waiting), None)) is not None:
                    waiting.remove(job)
                    worker.job = job
                    worker.connection.send((order, job))
            working = [worker for worker in self._workers if worker.job is not None]
            if not working:
                if not (waiting and any(base.until is not None and not base.is_done() for base in elsewhere)):
                    return
                time.sleep(POLL_SECONDS)
            wait([worker.connection for worker in working])
            for worker in working:
                if worker.job is not None and worker.connection.poll():
                    job, worker.job = worker.job, None
                    outcome = self._outcome(worker)
                    if outcome.kind == "busy":
                        elsewhere.append(job)
                    yield job, outcome

    def _idle(self, wanted: int) -> list[Worker]:
        """The idle workers; first starts workers until there are ``wanted``, or ``number``, in all."""
        while len(self._workers) < min(self.number, wanted):
            self._workers.append(self._start())
        return [worker for worker in self._workers if worker.job is None]

    def _outcome(self, worker: Worker) -> JobOutcome:
        """Receive a worker's outcome; "failed" if the process has ended instead."""
        try:
            found: JobOutcome = worker.connection.recv()
        except EOFError:
            worker.process.join()
            self._workers.remove(worker)
            return JobOutcome("failed", f"its process ended with exit code {worker.process.exitcode}")
        return found

    def _start(self) -> Worker:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        others = [ours, *(worker.connection for worker in self._workers)]
        process = context.Process(target=_work, args=(theirs, others, os.getpid(), self.logs))
        process.start()
        theirs.close()
        return Worker(process, ours)


def _work(orders: Connection, others: list[Connection], parent: int, logs: Path) -> None:
    """The main function of a worker: carry out orders until the sweep closes the connection.

    others: connections inherited from the sweep, to be closed.
    """
    die_with_parent(parent)
    os.setsid()  # Ctrl-C reaches only the sweep, which then stops its workers
    for connection in others:
        connection.close()
    try:
        with Nodes(NodeRank()) as nodes:
            while True:
                order, job = orders.recv()
                _print_to(logs / f"{job.name.replace('/', ',')}.log")
                outcome = _attempt(order, nodes, job)
                orders.send(outcome)
                if outcome.kind == "stopped":
                    return
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        return


def _print_to(log: Path) -> None:
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
    os.close(output)


def _attempt(order: Callable[[Nodes, Job], None], nodes: Nodes, job: Job) -> JobOutcome:
    start = time.monotonic()
    try:
        order(nodes, job)
    except Busy as error:
        return JobOutcome("busy", str(error))
    except KeyboardInterrupt:
        return JobOutcome("stopped")
    except Exception as error:
        kind: Kind = "mistake" if isinstance(error, UserError) else "failed"
        cause = str(error) if isinstance(error, UserError | PhaseFailed) else repr(error)
        print(cause, flush=True)
        return JobOutcome(kind, cause)
    return JobOutcome("done", seconds=time.monotonic() - start)


def _check(nodes: Nodes, job: Job) -> None:
    check(nodes.starter, job.recipe, optimizes=job.until != 0)


def _make(nodes: Nodes, job: Job) -> None:
    if job.is_done():  # another sweep has made it in the meantime
        return
    if job.source is not None:
        optimize_branch(nodes, job.source, job.directory, job.settings)
        return
    until = None if job.until is None else ("rollout", job.until)
    check(nodes.starter, job.recipe, optimizes=optimizes(job.run, until))
    with job.run.lock():
        train(nodes, RunDir.create(job.directory, job.recipe), until)
