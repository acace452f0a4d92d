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
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path

from megarl.commands.one_phase import optimize_branch
from megarl.commands.sweep.plan import Job
from megarl.commands.train import optimizes, train
from megarl.errors import Busy, PhaseFailed, UserError
from megarl.linux import die_with_parent
from megarl.planner.preflight import check
from megarl.storage.files import make_directory
from megarl.storage.run_dir import RunDir
from megarl.workers.node_rank import NodeRank
from megarl.workers.nodes import Nodes

POLL_SECONDS = 2.0  # how often to look whether rollouts that another sweep generates are ready

# a job with the error that ended it: `Busy` if another process works on the run
Ended = tuple[Job, BaseException | None]
Order = Callable[[Nodes, Job], None]  # `check_run` or `make_run`


class Workers:
    """A pool of worker processes; leaving the context stops them.

    number: of workers at most. logs: the directory for what the runs print.
    """

    def __init__(self, number: int, logs: Path) -> None:
        self._number, self._logs = number, logs
        self._processes: dict[Connection, ForkProcess] = {}
        self._busy: dict[Connection, Job] = {}  # what a worker works on
        make_directory(logs)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        """Ask workers that are busy to save and stop, as Ctrl-C does, and wait for all."""
        for connection, process in self._processes.items():
            if connection in self._busy:
                process.terminate()
            connection.close()  # no more orders
        for process in self._processes.values():
            process.join()

    def process(self, order: Order, jobs: list[Job], is_possible: Callable[[Job], bool]) -> Iterator[Ended]:
        """Give ``order`` for every job, once it is possible, to the workers and yield each job when it ends.

        Jobs that are still not possible when all others have ended are left out. KeyboardInterrupt if one is stopped.
        """
        waiting, elsewhere = list(jobs), list[Job]()
        while True:
            while len(self._processes) < min(self._number, len(waiting)):
                self._start()
            for connection in [each for each in self._processes if each not in self._busy]:
                if (job := next(filter(is_possible, waiting), None)) is not None:
                    waiting.remove(job)
                    self._busy[connection] = job
                    connection.send((order, job))
            if not self._busy:
                if not (waiting and any(base.until is not None and not base.is_done() for base in elsewhere)):
                    return
                time.sleep(POLL_SECONDS)
            ready = wait(list(self._busy))
            for connection in [each for each in self._busy if each in ready]:
                job, error = self._busy.pop(connection), self._receive(connection)
                if isinstance(error, KeyboardInterrupt):
                    raise error
                if isinstance(error, Busy):
                    elsewhere.append(job)
                yield job, error

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        others = [ours, *self._processes]
        self._processes[ours] = context.Process(target=_work, args=(theirs, others, os.getpid(), self._logs))
        self._processes[ours].start()
        theirs.close()

    def _receive(self, connection: Connection) -> BaseException | None:
        """The error with which a job has ended, also if the worker itself has ended."""
        try:
            error: BaseException | None = connection.recv()
        except EOFError:
            process = self._processes.pop(connection)
            process.join()
            return PhaseFailed(f"its process ended with exit code {process.exitcode}")
        return error


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
                error = _attempt(order, nodes, job)
                orders.send(error)
                if isinstance(error, KeyboardInterrupt):
                    return
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        return


def _print_to(log: Path) -> None:
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
    os.close(output)


def _attempt(order: Order, nodes: Nodes, job: Job) -> BaseException | None:
    try:
        order(nodes, job)
    except (Busy, KeyboardInterrupt) as error:
        return error
    except Exception as error:
        cause = error if isinstance(error, UserError | PhaseFailed) else PhaseFailed(repr(error))
        print(cause, flush=True)
        return cause
    return None


def check_run(nodes: Nodes, job: Job) -> None:
    """Make the checks that a run begins with."""
    nodes.starter.prepare(job.recipe)  # with what later jobs of this worker need
    check(nodes.starter, job.recipe, optimizes=job.until != 0)


def make_run(nodes: Nodes, job: Job) -> None:
    """Make or continue a run."""
    if job.is_done():  # another sweep has made it in the meantime
        return
    nodes.starter.prepare(job.recipe)
    if job.source is not None:
        optimize_branch(nodes, job.source, job.directory, job.point.settings)
        return
    until = None if job.until is None else ("rollout", job.until)
    check(nodes.starter, job.recipe, optimizes=optimizes(job.run, until))
    with job.run.lock():
        train(nodes, RunDir.create(job.directory, job.recipe), until)
