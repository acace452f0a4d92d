"""The worker processes of a sweep, each of which makes one run after another.

Workers are forks of the sweep's process, each in a session of its own. A worker makes its runs as `megarl train` and
`megarl optimize` do, and uses one fork server for all of them. No worker outlives the sweep.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import cache
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
from megarl.workers.processes import Starter

ASK_SECONDS = 5.0  # between two requests to stop; a worker that has just got its job does not hear the first
POLL_SECONDS = 2.0  # how often to look whether rollouts that another sweep generates are ready

# a job with the error that ended it: `Busy` if another process works on the run, KeyboardInterrupt if it was stopped
Ended = tuple[Job, BaseException | None]


class Workers:
    """A pool of worker processes; leaving the context stops them.

    number: of workers. logs: the directory for what the runs print.
    """

    def __init__(self, number: int, logs: Path) -> None:
        make_directory(logs)
        self._number, self._logs = number, logs
        self._pool = ProcessPoolExecutor(number, multiprocessing.get_context("fork"), _begin, (os.getpid(),))
        self._busy: dict[Future[BaseException | None], Job] = {}

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        """Ask workers that are busy to save and stop, as Ctrl-C does, and wait for all."""
        left = set(self._busy)
        while left:
            for process in multiprocessing.active_children():
                process.terminate()
            left = wait(left, ASK_SECONDS).not_done
        self._pool.shutdown()

    def check(self, jobs: list[Job]) -> Iterator[Ended]:
        """Make for each run the checks that a run begins with."""
        return self._process(_check, jobs, lambda job: True)

    def make(self, jobs: list[Job]) -> Iterator[Ended]:
        """Make or continue runs, each once the rollouts that it needs exist."""
        return self._process(_make, jobs, Job.is_possible)

    def _process(
        self, order: Callable[[Nodes, Job], None], jobs: list[Job], is_possible: Callable[[Job], bool]
    ) -> Iterator[Ended]:
        """Carry out ``order`` for every job and yield each job when it ends; `PhaseFailed` if a worker was killed.

        Jobs that are still not possible when all others have ended are left out.
        """
        waiting, elsewhere = list(jobs), list[Job]()
        while True:
            for job in [job for job in waiting if is_possible(job)][: self._number - len(self._busy)]:
                waiting.remove(job)
                self._busy[self._pool.submit(_attempt, order, job, self._logs)] = job
            if not self._busy:
                if not (waiting and any(base.until is not None and not base.is_done() for base in elsewhere)):
                    return
                time.sleep(POLL_SECONDS)
            for future in wait(self._busy, return_when=FIRST_COMPLETED).done:
                job = self._busy.pop(future)
                try:
                    error = future.result()
                except BrokenProcessPool as broken:
                    raise PhaseFailed(f"a process of the sweep was killed, maybe while it made {job.name}") from broken
                if isinstance(error, Busy):
                    elsewhere.append(job)
                yield job, error


def _begin(parent: int) -> None:
    """Make a fork a worker. Between two jobs it ignores that it should stop: the pool ends it then."""
    die_with_parent(parent)
    os.setsid()  # Ctrl-C reaches only the sweep, which then stops its workers
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@cache
def _starter() -> Starter:
    """The starter of this worker's runs, which share its fork server."""
    return Starter()


def _attempt(order: Callable[[Nodes, Job], None], job: Job, logs: Path) -> BaseException | None:
    """Carry out an order, with the output in a log; returns the error with which it ended."""
    output = os.open(logs / f"{job.name.replace('/', ',')}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
    os.close(output)
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with Nodes(NodeRank(), _starter()) as nodes:
            order(nodes, job)
    except (Busy, KeyboardInterrupt) as error:
        return error
    except Exception as error:
        cause = error if isinstance(error, UserError | PhaseFailed) else PhaseFailed(repr(error))
        print(cause, flush=True)
        return cause
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return None


def _check(nodes: Nodes, job: Job) -> None:
    nodes.starter.prepare(job.recipe)  # with what later jobs of this worker need
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
